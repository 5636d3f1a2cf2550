"""A step of another library's loop on replicas: what all integrations have in common.

Imports the engine, and no library whose loop it is.

Runs in the thread of the library's loop; calls of step functions run in the replicas'
threads.
"""
