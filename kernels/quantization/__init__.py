"""Block types, GGUF's and our own, decoded."""
