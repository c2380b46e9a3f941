"""Attention of encoders on a GPU: torch's own kernels (`candidates.py`), tried and timed
(`measure.py`), one chosen, saved on disk.
"""
