"""Golden checkpoints of one family in memory at a time."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from blocks import group


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    group(items, _family)


def _family(item: pytest.Item) -> Hashable | None:
    """The family whose files a test of `test_golden.py` reads."""
    if item.path.name != "test_golden.py" or not hasattr(item, "callspec"):
        return None
    params = item.callspec.params
    return item.path, params.get("family") or params["path"].partition("/")[0]
