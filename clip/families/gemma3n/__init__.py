"""Gemma 3n: eyes, ears."""
