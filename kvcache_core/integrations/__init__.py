"""Bridges from other libraries to the cache; each is a module of its own, imported only when asked for."""
