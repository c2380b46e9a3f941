"""The device thread has the priority of the process, whoever asks it for something."""

from __future__ import annotations

import os

import pytest
from priorities import behind, on_linux, priority

from mtmd.loaded import device_thread
from mtmd.loaded.device_thread import DeviceThread


@on_linux
@pytest.mark.parametrize("used_before", [True, False])
def test_who_asks_does_not_change_its_priority(
    used_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_thread, "IDLE_S", 0.0)
    subject = DeviceThread()
    if used_before:
        assert subject.exclusively(priority) == priority()
        thread = subject._thread
        if thread is not None:
            thread.join()  # for want of work
    assert behind(lambda: subject.exclusively(priority)) == priority()
    subject.close()
    assert priority() == os.getpriority(os.PRIO_PROCESS, os.getpid())
