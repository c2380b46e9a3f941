"""GGUF's block types, decoded."""
