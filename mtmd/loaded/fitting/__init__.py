"""Layouts of a model in the memories there are, what each needs by part (one way to predict, for
warm-up, `--fit` and `mtmd fit`), and which is chosen.
"""
