"""Checkpoints by name, folder or GGUF: searched, fetched, opened."""
