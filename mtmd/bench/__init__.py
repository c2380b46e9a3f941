"""Benchmarks: stages measured one by one, against the machine's ceilings; random weights in the
shape of any model.
"""
