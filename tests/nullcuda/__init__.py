"""Torch's own CUDA path without a card: see README.md."""
