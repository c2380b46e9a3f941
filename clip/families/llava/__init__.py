"""LLaVA 1.5, NeXT and OneVision."""
