"""Qwen3-Next, and the decoder of Qwen3.5."""
