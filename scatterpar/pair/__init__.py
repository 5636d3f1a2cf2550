"""The pair that leaves outputs and losses where they are made; the engine knows nothing of it."""
