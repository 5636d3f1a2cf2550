"""Whether a machine is sound: ``scatterpar.doctor()``, and the command of this name.

Imports the engine, like any user of it.

Runs in the caller's thread.
"""
