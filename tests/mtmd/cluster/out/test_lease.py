"""One command at a time, also after one was killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mtmd.base.errors import DeviceError, OptionError
from mtmd.cluster.out import lease as leases
from mtmd.cluster.out.folder import Folder
from mtmd.cluster.out.lease import LEASE, LEASE_S, Lease, is_running, this_process


@pytest.fixture(params=("here", "memory://bucket/out.jsonl"))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Folder]:
    far = "://" in request.param
    yield Folder(request.param if far else str(tmp_path / "out.jsonl"))
    if far:
        fsspec.filesystem("memory").rm("/bucket", recursive=True)


class Clock:
    """Time that passes where somebody sleeps; `then` is done meanwhile."""

    def __init__(self, then: Callable[[], object] = lambda: None) -> None:
        self.now, self.then = 0.0, then

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.then()


def left(folder: Folder) -> set[str]:
    """What commands have there."""
    assert folder.names() == set(), "beside rows nothing lies that is no row"
    return folder.inside(LEASE).names()


def elsewhere(_: Mapping[str, Any]) -> None:
    """Nothing is known of processes there."""


def from_far(folder: Folder, then: Callable[[], object] = lambda: None) -> tuple[Lease, Clock]:
    clock = Clock(then)
    return Lease(folder, clock=lambda: clock.now, sleep=clock.sleep, lives=elsewhere), clock


def test_a_second_command_is_refused_and_may_begin_when_the_first_is_done(folder: Folder) -> None:
    with Lease(folder) as first:
        with pytest.raises(OptionError, match=rf"another command at work .*process {os.getpid()}"):
            Lease(folder).take()
        first.beat()
        first.check()
    assert left(folder) == set()
    with Lease(folder):
        pass


def test_whether_one_on_another_machine_lives_is_seen_from_its_beat(folder: Folder) -> None:
    first = Lease(folder)
    first.take()
    second, clock = from_far(folder, first.beat)
    with pytest.raises(OptionError, match="at work there"):
        second.take()
    assert clock.now < LEASE_S

    third, clock = from_far(folder, first.give_back)  # it ends meanwhile
    third.take()
    assert clock.now < LEASE_S
    third.give_back()
    assert left(folder) == set()


def test_one_that_has_no_beat_is_followed_and_told_when_it_wakes(folder: Folder) -> None:
    first = Lease(folder)
    first.take()
    second, clock = from_far(folder)
    second.take()
    assert clock.now >= LEASE_S
    second.check()
    first.beat()
    with pytest.raises(DeviceError, match="another command goes on there"):
        first.check()
    there = left(folder)
    first.give_back()
    assert left(folder) == there, "nothing of the second is taken away"
    second.beat()
    second.check()
    second.give_back()
    assert left(folder) == set()
    first.beat()
    with pytest.raises(DeviceError):
        first.check()


def test_of_two_that_follow_one_that_was_killed_one_does(folder: Folder) -> None:
    Lease(folder).take()
    done: list[Lease] = []

    def other() -> None:
        """Follows as the second is about to."""
        if not done:
            done.append(Lease(folder, lives=lambda _: False))
            done[0].take()

    second = Lease(folder, lives=lambda _: bool(done) or bool(other()))
    with pytest.raises(OptionError, match="at work there"):
        second.take()
    done[0].beat()
    done[0].check()


def test_one_that_was_killed_on_this_machine_is_followed_at_once(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from mtmd.cluster.out.folder import Folder\n"
        "from mtmd.cluster.out.lease import Lease\n"
        "Lease(Folder(sys.argv[1])).take()\n"
        "print('taken', flush=True)\n"
        "sys.stdin.read()\n"
    )
    place = str(tmp_path / "rows.jsonl")
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, place], **pipes) as other:
        assert other.stdout is not None and other.stdout.readline() == b"taken\n"
        with pytest.raises(OptionError, match=f"process {other.pid} on"):
            Lease(Folder(place)).take()
        other.send_signal(signal.SIGKILL)
        other.wait()
    said: list[str] = []
    with Lease(Folder(place), said.append, sleep=lambda _: pytest.fail("nothing to wait for")):
        assert {name[:6] for name in left(Folder(place))} == {"000002"}
    assert said == []


def test_whose_process_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    me = this_process()
    assert is_running(me) is True
    assert is_running(me | {"began": "1"}) is False, "another one has the number by now"
    assert is_running(me | {"numbers": "another machine"}) is None
    assert is_running({}) is None
    monkeypatch.setattr(leases, "_numbers", lambda: None)
    assert is_running(this_process()) is None, "a system that does not tell"


@pytest.mark.parametrize("data", (b"", b"[]", b"{", b"[[1]]"))
def test_a_claim_that_cannot_be_read_is_one_all_the_same(data: bytes, tmp_path: Path) -> None:
    folder = Folder(str(tmp_path))
    folder.inside(LEASE).make()
    folder.inside(LEASE).write("000004.json", data)
    lease, clock = from_far(folder)
    lease.take()
    assert clock.now >= LEASE_S and "000005.json" in left(folder)
    lease.give_back()
    assert left(folder) == set()


def test_a_beat_that_cannot_be_written_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leases, "BEAT_S", 0.001)
    folder, tries = Folder(str(tmp_path)), 0
    lease = Lease(folder)

    def names() -> set[str]:
        nonlocal tries
        tries += 1
        if tries > 2:
            lease._end.set()
        raise OSError("out of reach")

    with lease:
        monkeypatch.setattr(lease._own, "names", names)
        assert lease._end.wait(10)
    lease.check()
    assert "no sign of life written" in caplog.text


def test_no_beat_looks_at_the_rows(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which there may be a hundred thousand files, and more."""
    monkeypatch.setattr(folder, "names", lambda: pytest.fail("all rows are listed"))
    with Lease(folder) as lease:
        lease.beat()
        lease.check()


def test_one_that_wakes_is_told_though_its_number_was_given_anew(folder: Folder) -> None:
    first = Lease(folder)
    first.take()
    second = Lease(folder, lives=lambda _: False)
    second.take()
    second.give_back()
    third = Lease(folder)
    third.take()
    first.beat()
    with pytest.raises(DeviceError, match="another command goes on there"):
        first.check()
    there = left(folder)
    first.give_back()
    assert left(folder) == there
    third.beat()
    third.check()
    third.give_back()
    assert left(folder) == set()


def test_one_that_wakes_after_another_has_ended_is_told(folder: Folder) -> None:
    first = Lease(folder)
    first.take()
    second = Lease(folder, lives=lambda _: False)
    second.take()
    second.give_back()
    first.beat()
    with pytest.raises(DeviceError, match="its claim is gone: another command went on there"):
        first.check()
    assert left(folder) == set()


def test_a_store_that_writes_over_a_claim_has_one_owner(folder: Folder) -> None:
    first, second = Lease(folder), Lease(folder, lives=lambda _: bool(first._number))
    own = first._own.write

    def write(name: str, data: bytes) -> bool:
        wrote = own(name, data)
        if name.endswith(".json") and not second._number:
            first._own.remove(name)
            second.take()
        return wrote

    first._own.write = write  # type: ignore[method-assign]
    with pytest.raises(OptionError, match="another command at work"):
        first.take()
    second.beat()
    second.check()
    second.give_back()


def test_a_moment_without_the_folder_ends_nothing(tmp_path: Path) -> None:
    """As where a share is mounted anew."""
    share, away = tmp_path / "share", tmp_path / "away"
    lease = Lease(Folder(str(share / "out.jsonl")))
    lease.take()
    share.rename(away)
    for empty in (False, True):
        if empty:
            (share / "out.jsonl").mkdir(parents=True)
        with pytest.raises(OSError):
            lease.beat()
        lease.check()
    (share / "out.jsonl").rmdir()
    share.rmdir()
    away.rename(share)
    lease.beat()
    lease.check()
    lease.give_back()
    assert left(lease.folder) == set()
