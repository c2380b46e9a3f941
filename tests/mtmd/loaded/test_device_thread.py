"""A child that is forked has a device thread of its own."""

from __future__ import annotations

import os
import threading

import pytest
from forking import forked

from mtmd.loaded.device_thread import BUSY_AT_FORK, NOT_FORKED, DeviceThread, DeviceUser


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_goes_on_with_a_thread_of_its_own_where_nothing_was_under_way() -> None:
    subject = DeviceThread()
    user = DeviceUser(subject, lambda: None, lambda: None, _raise, lambda: None)
    assert user.exclusively(os.getpid) == os.getpid(), "its thread runs"

    def in_child() -> bool:
        done = user.exclusively(os.getpid) == os.getpid()
        user.close()
        return done

    assert forked(in_child) == "True"
    assert user.exclusively(os.getpid) == os.getpid()
    subject.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_is_told_what_its_parent_was_in_the_midst_of() -> None:
    subject, goes_on, began = DeviceThread(), threading.Event(), threading.Event()
    user = DeviceUser(subject, lambda: None, lambda: None, _raise, lambda: None)
    user.post(lambda: (began.set(), goes_on.wait())[0])
    assert began.wait(20)
    reported = forked(lambda: user.exclusively(os.getpid))
    assert reported == f"DeviceError: {BUSY_AT_FORK}"
    goes_on.set()
    assert user.exclusively(os.getpid) == os.getpid(), "the parent goes on"
    subject.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_leaves_its_parents_device_alone() -> None:
    subject = DeviceThread()
    subject.can_fork = False
    assert forked(lambda: subject.exclusively(os.getpid)) == f"DeviceError: {NOT_FORKED}"
    assert subject.exclusively(os.getpid) == os.getpid()
    subject.close()


def _raise(error: BaseException) -> None:
    raise error
