"""One process and its interpreter's lock: replicas with it and without."""
