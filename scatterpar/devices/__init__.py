"""Memories and streams of devices, and copies between them.

Every other package uses this one. It knows nothing of modules, batches or threads. A new kind of
device needs changes in ``runtime`` only.
"""
