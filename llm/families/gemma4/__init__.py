"""Gemma 4's decoder."""
