"""Building blocks of decoders; what one forward reads (`batch.py`, `inputs.py`), what a layer keeps
(`state.py`); plans made alongside (`plan_maker.py`), and shapes of batches that are foreseen.
"""
