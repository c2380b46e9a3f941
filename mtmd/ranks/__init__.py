"""Ranks: the other processes of a model that several share, started and led; `signs.py` watches
signs of life; `mtmd/follower.py` is one of them.
"""
