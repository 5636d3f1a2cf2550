"""What values refer to, and what user code may write: to walk, to compare, to restore.

::

    references    what a value is made of, and refers to
    reach         what values lead to: one function per question
    quantised     weights that hold other tensors, or consist of them
    whose         is an object the user's, a library's, data, or shared with threads?
    walk          what roots lead to, and the places that refer to it
    snapshot      what containers refer to: what was rebound since then?
    savers        how values of each class are saved, compared and restored
    journal       what each variable was: to compare, and to restore

The package knows no engine: a wrapper of a module registers itself (``walk.py``).

Imports ``batch``, ``devices``, and the files that every package may import.

The thread that calls user code saves its state, and restores it.
"""
