"""The ground that every room stands on, which imports nothing of ours: errors, texts in messages,
options checked, files and locks, cores, turns and cancellation of threads, tracebacks.
"""
