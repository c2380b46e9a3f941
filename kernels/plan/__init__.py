"""Plans: nodes placed on backends, layers over several devices (`layer_split.py`), copies, memory
prediction, flash attention on or off, wide values in blocks of rows (`row_blocks.py`), lowering to
machine code (`lower.py`; `arena.py`: memory that values share), running, by how many threads;
memory that is free.
"""
