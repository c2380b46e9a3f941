"""Quantized checkpoints in the safetensors format: what config.json says of them, and their codes
and scales as rows of blocks.
"""
