"""One build of each checkpoint for all that is tested of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
from blocks import group, once
from common import Oracle
from table import ROWS

Build = Callable[[str, str], Oracle]
FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    group(items, _variant)


def _variant(item: pytest.Item) -> Hashable | None:
    """Tests of a variant of a family follow each other: a few models are in memory, not all."""
    if item.path.parent != FOLDER or not isinstance(item, pytest.Function):
        return None
    params = item.callspec.params if hasattr(item, "callspec") else {}
    if "row" not in params:
        return None
    return params["row"], params.get("variant", next(iter(ROWS[params["row"]].variants)))


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """`build(row, variant)` is the oracle of that variant, made once for tests that follow each
    other.
    """

    def build(row: str, variant: str) -> Oracle:
        def make() -> Oracle:
            return ROWS[row].variants[variant](tmp_path_factory.mktemp(row))

        return once((row, variant), make)

    return build
