"""The warm-up report: facts (`facts.py`, plain data that loads without torch; `from_plans.py` reads
them off plans), checks, text; what the machine could do (`ceilings.py`) and what keeps it from that
(`why_slow.py`).
"""
