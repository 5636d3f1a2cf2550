"""State that user code may write: whose it is, what leads to it, how it is put back.

::

    whose      is an object the user's, a library's, data, or shared with other threads?
    walk       what roots lead to, and the places that refer to it
    savers     how values of each class are saved, compared and restored
    journal    what each variable was: to compare, and to restore
    reports    names of what calls move

The package knows no engine: a wrapper of a module registers itself (``walk.py``).

Imports ``replicas`` and the packages below it.

The thread that calls user code saves its state, and restores it.
"""
