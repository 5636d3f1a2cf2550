"""Whether a machine is sound."""
