"""The output folder that many machines reach (`folder.py`), its files of rows (`parts.py`)."""
