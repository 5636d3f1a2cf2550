"""The options of an engine and of a call that switch something on; a file each.

Imports ``distributed``, ``verify``, ``step`` and the packages below them.

The engine calls each option in the caller's thread; schedules run their sub-steps in
the workers' threads.
"""
