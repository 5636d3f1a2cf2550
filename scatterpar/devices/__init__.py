"""Everything that differs between memories, and everything that crosses between them.

Every room comes in here; nothing here knows modules, batches or threads. A new kind of device
is a change of ``runtime`` alone.
"""
