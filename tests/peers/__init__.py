"""Other libraries' own tests, with replicas: see ``__main__.py``."""
