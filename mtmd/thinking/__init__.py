"""Thoughts of a model before it answers: marks and switches read from its template and vocabulary
(`probe.py`), a text split at the marks, the thought of one answer (`thought.py`), those of earlier
turns.
"""
