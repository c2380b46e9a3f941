"""Dual encoders: pictures and texts as vectors of one space."""
