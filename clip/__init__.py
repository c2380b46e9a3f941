"""Pictures to embeddings: the encoder, its warm-up, the table of vision families; small pictures of
unequal sizes in one run (`grids.py`: how they lie, `packing.py`: which); the budget of tokens for a
picture (`token_budget.py`).
"""
