"""Published models, each with transformers' answers to the same. `make published` runs these files:
they need models that it fetches, and take minutes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from published_models import MODELS
from published_subject import Subject

FOLDER = Path(__file__).parents[2] / ".venv-published" / "models"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--published", default=" ".join(MODELS), help="models, between blanks")
    parser.addoption("--published-folder", type=Path, default=FOLDER, help="where their files are")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of models that are not chosen are not there, and those of one model follow each other:
    a model is in memory once.
    """
    here = [item for item in items if item.path.parent == Path(__file__).parent]
    if here:
        chosen = config.getoption("--published").split()
        others = [item for item in items if item not in here]
        items[:] = others + [item for name in chosen for item in here if _model_of(item) == name]


def _model_of(item: pytest.Item) -> str:
    assert isinstance(item, pytest.Function)
    return str(item.callspec.params["subject"])


class Subjects:
    """One model at a time."""

    def __init__(self, folder: Path):
        self._folder, self._stack = folder, ExitStack()
        self._made: Subject | None = None

    def get(self, name: str) -> Subject:
        if self._made is None or self._made.name != name:
            self.close()
            self._made = Subject(name, self._folder, self._stack)
        return self._made

    def close(self) -> None:
        """Write what was measured, for `quality_table.py`, and end what was started."""
        self._stack.close()
        if self._made is not None and self._made.results:
            written = self._folder / "results.json"
            results = json.loads(written.read_text()) if written.exists() else {}
            name = self._made.name
            results[name] = results.get(name, {}) | self._made.results
            written.write_text(json.dumps(results, indent=1))
        self._made = None


@pytest.fixture(scope="session")
def subjects(pytestconfig: pytest.Config) -> Iterator[Subjects]:
    made = Subjects(pytestconfig.getoption("--published-folder"))
    yield made
    made.close()


@pytest.fixture
def subject(request: pytest.FixtureRequest, subjects: Subjects) -> Subject:
    return subjects.get(request.param)
