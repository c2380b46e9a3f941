"""One prompt over many pictures: rows written, what a later run goes on with (`resuming.py`), one
command at a time to a file (`output_lock.py`).
"""
