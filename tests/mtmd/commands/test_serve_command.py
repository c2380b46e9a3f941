"""`mtmd serve` tells mistakes before it says that it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--parallel", 0), "parallel: found 0"),
        (("--context", 0), "context: found 0"),
        (("-m", "nosuch"), "nosuch"),
        (("--mmproj", "none.gguf"), "none.gguf"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_mistakes_come_before_the_line_about_loading(
    words: tuple[Any, ...], told: str, mtmd: Any, tmp_path: Path
) -> None:
    assert told in mtmd("serve", "--port", 0, "--data", tmp_path, *words).refused()
