"""Gemma 4's vision tower."""
