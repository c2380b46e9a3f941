"""The compute floor: what a value is (`graph.py`), what families call (`layers.py`), types of
numbers, kernels.
"""
