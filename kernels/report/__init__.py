"""The warm-up report: facts (`facts.py`, plain data that loads without torch; `from_plans.py` reads
them off plans), checks, text; what the machine could do (`measured_speeds.py`) and what keeps it
from that (`why_slow.py`).
"""
