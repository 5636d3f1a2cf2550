"""Other libraries' training loops on top of the engine, which knows nothing of them.

Each is a module of the library's name, imported by whoever uses it: ``import scatterpar`` does not.
"""
