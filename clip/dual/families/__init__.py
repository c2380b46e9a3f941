"""Families of dual encoders, one file each."""
