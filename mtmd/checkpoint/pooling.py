"""Tells models that give vectors from those that write answers, by the files which
sentence-transformers reads of both.
"""

from __future__ import annotations

from pathlib import Path

from mtmd.kernels.checkpoint.settings import read_json

POOLING = Path("1_Pooling", "config.json")


def gives_last_state(folder: Path) -> bool:
    """Return whether a folder is a model's whose vector of a prompt is its last token's state.
    Raises ModelError for a file that is no JSON object.
    """
    pooling = read_json(folder / POOLING, required=False)
    newer = pooling.get("pooling_mode") == "lasttoken"
    return newer or pooling.get("pooling_mode_lasttoken") is True
