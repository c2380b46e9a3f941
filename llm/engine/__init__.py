"""The engine: many sequences in batches, which run next (`scheduler.py`), pages of keys and values,
preemption, one forward.
"""
