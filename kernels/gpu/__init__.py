"""Kernels of GPUs, in Triton: one file a kernel, one line a kernel in `table.py`."""
