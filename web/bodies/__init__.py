"""Bodies of requests: how much of all together is in memory, and what clients have compressed
(`compressed.py`), read within the same limits.
"""
