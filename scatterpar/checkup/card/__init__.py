"""``python -m benchmarks card``: what can only be settled on GPUs, in ten minutes, on one page."""
