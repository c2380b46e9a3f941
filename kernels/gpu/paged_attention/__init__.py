"""Attention to the pages of a key/value cache."""
