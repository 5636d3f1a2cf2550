"""Compiled replicas beside eager ones, and beside compiled processes."""
