"""Copies of the user's modules that are never stale, and what all wrappers of a module share.

The engine, the pair and ``step`` come in here. Replicas know the devices below them,
and neither threads nor batches.
"""
