"""How fast, how much traffic, how much memory: measured, with the peers named."""
