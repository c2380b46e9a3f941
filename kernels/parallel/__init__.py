"""A graph rewritten for one rank of several: how values may be cut (`dims.py`), a rule for each op
(`rules.py`), where (`cuts.py`); sums between processes, on one machine through memory
(`shared_memory.py`).
"""
