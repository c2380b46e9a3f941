"""`pytest --cpu-seconds`: CPU seconds of each file and of the slowest tests, processes that they
started and waited for included. They are much the same on a busy machine and on an idle one.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

SHOWN = 40


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cpu-seconds", action="store_true", help="print CPU seconds by file and by test"
    )


def used() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


class CpuSeconds:
    """Counts from the end of one test to the end of the next, so that nothing is left out."""

    def __init__(self) -> None:
        self.last, self.files, self.tests = used(), Counter[str](), Counter[str]()
        self.count = Counter[str]()

    def _add(self, name: str) -> float:
        now = used()
        taken, self.last = now - self.last, now
        self.files[name] += taken
        return taken

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(self) -> Generator[None, Any, Any]:
        report = yield
        self._add("(collecting)")
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        result = yield
        name = item.nodeid.partition("::")[0]
        self.count[name] += 1
        self.tests[item.nodeid.partition("[")[0]] += self._add(name)
        return result

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        write = terminalreporter.write_line
        terminalreporter.section(f"CPU seconds: {self.files.total():.1f}")
        for name, seconds in self.files.most_common(SHOWN):
            write(f"{seconds:8.2f}  {self.count[name]:5} tests  {name}")
        terminalreporter.section("CPU seconds of tests, with all their parameters")
        for name, seconds in self.tests.most_common(SHOWN):
            write(f"{seconds:8.2f}  {name}")
