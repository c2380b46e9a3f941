"""A few hundred damaged files of weights; `make hostile` takes two thousand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from damaged_files import KINDS, Kind, attack, matrix, quantized, source

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]
COUNTS: dict[Kind, int] = {quantized: 400, matrix: 400, source: 15}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_is_read_or_refused_in_one_line(kind: Kind, tmp_path: Path) -> None:
    count = COUNTS[kind]
    result = attack(kind, count, 1, tmp_path)
    assert not result.problems, result.problems
    assert min(result.read, result.refused) > count // 20, result
