"""The version of scatterpar, in a file that any other may import."""

__version__ = "0.4.0"
