"""Checkpoints converted: GGUF files for every program that reads them, safetensors in FP8."""
