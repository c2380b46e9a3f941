"""Models behind the server: which one answers a request, the only one or one of several, loaded and
unloaded (`schedule.py` is the rule).
"""
