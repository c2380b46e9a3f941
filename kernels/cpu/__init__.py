"""Kernels of the CPU: one file a kernel, one line a kernel in `table.py`."""
