"""Applications are made for nearly every test here, with the same routes: what werkzeug compiles of
a route, three quarters of what an application takes, is compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fake_service import FakeTicket, until
from werkzeug.routing import Rule


@pytest.fixture(scope="session", autouse=True)
def routes_compiled_once() -> Iterator[None]:
    """The functions that build addresses take the rule they are for as an argument: those of equal
    rules are equal.
    """
    compile_builder, made = Rule._compile_builder, dict[Any, Any]()

    def compiled(rule: Rule, append_unknown: bool = True) -> Any:
        key = rule.rule, append_unknown, tuple(rule._trace)
        if rule.defaults:
            return compile_builder(rule, append_unknown)
        if key not in made:
            made[key] = compile_builder(rule, append_unknown)
        return made[key]

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Rule, "_compile_builder", compiled)
        yield


@pytest.fixture(autouse=True)
def no_answer_outlives_its_test() -> Iterator[None]:
    """Some fake services say a word a minute: it would come while another test counts what lives."""
    yield
    for ticket in tuple(FakeTicket.read):
        ticket.cancel()
    assert until(lambda: not FakeTicket.read)
