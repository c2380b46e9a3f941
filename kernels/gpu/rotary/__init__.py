"""Rotary position embeddings, and keys and values into the cache."""
