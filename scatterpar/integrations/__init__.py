"""Other libraries' training loops on top of the engine, which knows nothing of them."""
