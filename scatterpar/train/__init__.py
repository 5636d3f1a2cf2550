"""A small training tool on the engine, and the example to read: start at
``training.py``.

Imports the engine, like any user of it.

Runs in the main thread. Worker processes read the data, and a thread joins it.
"""
