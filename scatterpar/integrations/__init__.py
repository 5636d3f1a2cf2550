"""Other libraries' training loops on top of the engine, which knows nothing of them.

Imports the engine, the pair, and the library; no library is imported without need.

Runs in the thread of the library's loop.
"""
