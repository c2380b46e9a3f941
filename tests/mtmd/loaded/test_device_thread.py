"""A device thread that stays is one and the same, with the priority of who had it begin."""

from __future__ import annotations

import os
import threading

import pytest

from mtmd.kernels.resources.priority import step_back
from mtmd.loaded import device_thread
from mtmd.loaded.device_thread import DeviceThread


def who() -> tuple[int, int]:
    thread = threading.get_native_id()
    return thread, os.getpriority(os.PRIO_PROCESS, thread)


@pytest.mark.parametrize("stays", [True, False])
def test_who_asks_does_not_change_the_priority_of_one_that_stays(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_thread, "IDLE_S", 0.0)
    subject, found = DeviceThread(), list[tuple[int, int]]()
    if stays:
        subject.stay()

    def ask() -> None:
        step_back()
        found.append(subject.exclusively(who))
        while not stays and subject._thread is not None:
            pass
        found.append(subject.exclusively(who))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    subject.close()
    (first, priority), (second, _) = found
    assert (first == second) == stays
    if stays:
        assert priority == os.getpriority(os.PRIO_PROCESS, os.getpid())
