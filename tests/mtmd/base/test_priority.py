"""Who steps back lets the others of the process go first, and nobody else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest
from priorities import behind, on_linux, priority

from mtmd.base.priority import BEHIND, NICEST, ahead, lower_thread_priority


def in_a_thread(result: list[int]) -> threading.Thread:
    return threading.Thread(target=lambda: result.append(priority()))


@on_linux
def test_a_thread_that_steps_back_is_behind_with_all_that_it_starts() -> None:
    result: list[int] = []

    def work() -> None:
        result.append(priority())
        lower_thread_priority()  # of one who is there already
        result.append(priority())
        thread = in_a_thread(result)
        thread.start()
        thread.join()

    before = os.getpriority(os.PRIO_PROCESS, os.getpid())
    behind(work)
    assert result == [min(before + BEHIND, NICEST)] * 3
    assert priority() == os.getpriority(os.PRIO_PROCESS, os.getpid()) == before


@on_linux
def test_what_is_started_ahead_has_the_priority_of_the_process() -> None:
    result: list[int] = []
    report = "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"

    def work() -> None:
        thread = in_a_thread(result)
        ahead(thread.start)
        thread.join()
        process = ahead(
            lambda: subprocess.Popen(
                [sys.executable, "-S", "-c", report], stdout=subprocess.PIPE, text=True
            )
        )
        result.append(int(process.communicate()[0]))

    behind(work)
    assert result == [os.getpriority(os.PRIO_PROCESS, os.getpid())] * 2


def test_what_is_started_ahead_gives_back_what_it_gives_or_raises() -> None:
    for run in (behind, lambda work: work()):
        assert run(lambda: ahead(lambda: 7)) == 7
        with pytest.raises(ValueError, match="nothing"):
            run(lambda: ahead(fails))


def fails() -> None:
    raise ValueError("nothing")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of threads beside a fork, in Python 3.12
def test_a_child_that_was_forked_waits_for_no_thread_of_its_parents() -> None:
    def fork() -> int:
        child = os.fork()
        if child == 0:
            os._exit(ahead(lambda: 7))
        return child

    assert os.waitstatus_to_exitcode(os.waitpid(behind(fork), 0)[1]) == 7
