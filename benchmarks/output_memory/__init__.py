"""Peak bytes on the master: the pair against gathering the outputs first."""
