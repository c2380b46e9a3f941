"""One build of each checkpoint a session."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from common import Oracle
from table import ROWS

Build = Callable[[str, str], Oracle]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build(row, variant)` is the oracle of that variant, made once."""
    made: dict[tuple[str, str], Oracle] = {}

    def build(row: str, variant: str) -> Oracle:
        if (row, variant) not in made:
            made[row, variant] = ROWS[row].variants[variant](tmp_path_factory.mktemp(row))
        return made[row, variant]

    return build
