"""Work that ends badly ends alone: each way to end, told for what it is, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from forking import forked
from processes import children

from mtmd.base.cancellation import cancel_if
from mtmd.base.errors import LeftError, MtmdError
from mtmd.base.isolation import fork_server as module
from mtmd.base.isolation.fork_server import ForkServer, Reason, Worker, WorkerFailed
from mtmd.base.isolation.limits import NICE, NICEST, Limits
from mtmd.base.turns import set_owner

LIMITS = Limits(1, 64 << 20)
SUPPORT = Path(__file__).parents[3] / "support"


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer("isolated_work", lambda: b"set up")
    yield made
    made.close()


def ask(server: ForkServer, what: bytes, limits: Limits = LIMITS) -> bytes:
    with server.job(limits) as worker:
        worker.send(what)
        return bytes(worker.receive())


def pid(server: ForkServer) -> int:
    return int(ask(server, b"pid").split()[0])


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended(number: int) -> bool:
    """Whether there is no such process, not even one that nobody has asked for."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return False


def is_stopped(number: int) -> bool:
    with suppress(FileNotFoundError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_worker_whose_jobs_go_well_does_others(server: ForkServer) -> None:
    assert ask(server, b"setup") == b"set up"
    assert [ask(server, bytes(n)) for n in (1, 70_000)] == [bytes(1), bytes(70_000)]
    first = pid(server)
    assert {pid(server) for _ in range(3)} == {first}


def test_workers_compute_with_one_thread(server: ForkServer) -> None:
    """Whichever library numpy was built with: OpenBLAS, MKL, one with OpenMP, or Accelerate."""
    environment = json.loads(ask(server, b"environment"))
    libraries = "OPENBLAS_NUM", "MKL_NUM", "OMP_NUM", "VECLIB_MAXIMUM"
    assert [environment.get(f"{name}_THREADS") for name in libraries] == ["1"] * 4


def test_it_does_not_do_them_for_ever(server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "JOBS", 2)
    pids = [pid(server) for _ in range(6)]
    assert len(set(pids)) >= 3
    until(lambda: all(ended(p) for p in set(pids[:-2])))


@pytest.mark.parametrize(
    "what, reason",
    [
        (b"burn", Reason.TIME),
        (b"take", Reason.MEMORY),
        (b"abort", Reason.MEMORY),  # what Rust does that gets none
        (b"fault", Reason.CRASH),
        (b"panic", Reason.CRASH),
    ],
)
def test_each_end_is_told(server: ForkServer, what: bytes, reason: Reason) -> None:
    before = pid(server)
    with pytest.raises(WorkerFailed) as caught:
        ask(server, what)
    assert caught.value.reason is reason
    assert caught.value.needs.startswith("more than")
    assert pid(server) != before
    until(lambda: ended(before))


def test_the_limits_are_those_of_the_job(server: ForkServer) -> None:
    for _ in range(2):  # also of a worker that had others before
        with pytest.raises(WorkerFailed):
            ask(server, b"take")
        assert len(ask(server, b"take", Limits(1, 256 << 20))) == 200


def test_a_worker_ends_when_who_asked_has_left(server: ForkServer) -> None:
    number = pid(server)
    looks = iter([False, False, True])
    cancel_if(lambda: next(looks))
    try:
        with pytest.raises(LeftError), server.job(Limits(60, 64 << 20)) as worker:
            worker.send(b"burn")
            worker.receive()
    finally:
        cancel_if(None)
    until(lambda: ended(number))
    assert next(looks, None) is None
    assert ask(server, b"still here") == b"still here"


def test_what_a_worker_says_has_a_limit(server: ForkServer) -> None:
    with pytest.raises(WorkerFailed), server.job(LIMITS) as worker:
        worker.send(b"long")
        worker.receive(999)


def test_who_takes_long_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    server, result = ForkServer("isolated_work", at_once=1), list[Reason]()

    def burn() -> None:
        try:
            ask(server, b"burn", Limits(3, 64 << 20))
        except WorkerFailed as error:
            result.append(error.reason)

    assert ask(server, b"warm") == b"warm"
    burners = [threading.Thread(target=burn) for _ in range(2)]
    for thread in burners:
        thread.start()
    for n in range(20):
        assert ask(server, b"%d" % n) == b"%d" % n
    assert result == []  # they burn yet
    for worker in children(server.pid or 0):
        os.kill(worker, signal.SIGKILL)
    for thread in burners:
        thread.join()
    assert result == [Reason.MEMORY] * 2  # as if the system had ended them
    server.close()


def test_two_who_have_only_long_jobs_keep_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than there are places, for long jobs too; what is stopped goes on."""
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    monkeypatch.setattr(module, "LONG_JOBS", 2)
    server = ForkServer("isolated_work", at_once=1)

    def sleep(owner: str) -> None:
        set_owner(owner)
        with suppress(WorkerFailed, MtmdError):
            ask(server, b"sleep", Limits(30, 64 << 20))

    assert ask(server, b"warm") == b"warm"
    sleepers = [threading.Thread(target=sleep, args=("ab"[n % 2],)) for n in range(4)]
    for thread in sleepers:
        thread.start()
    until(lambda: len(children(server.pid or 0)) == 4)
    assert [ask(server, b"%d" % n) for n in range(3)] == [b"%d" % n for n in range(3)]
    workers = children(server.pid or 0)
    assert any(map(is_stopped, workers)) and len(workers) >= 4
    for worker in workers:
        if not is_stopped(worker):
            os.kill(worker, signal.SIGKILL)
    until(lambda: not any(map(is_stopped, children(server.pid or 0))))
    server.close()
    for thread in sleepers:
        thread.join()


def test_workers_let_those_go_first_who_are_being_answered(server: ForkServer) -> None:
    nice = int(ask(server, b"pid").split()[1])
    assert nice == min(os.getpriority(os.PRIO_PROCESS, 0) + NICE, NICEST)


def test_who_takes_long_goes_on_at_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)
    server = ForkServer("isolated_work")
    before = pid(server)
    assert int(ask(server, b"burn and tell")) > NICE
    assert pid(server) != before  # and does no other job at that
    server.close()


def test_the_fork_server_is_started_anew(server: ForkServer) -> None:
    worker, before = pid(server), server.pid
    assert before is not None
    os.kill(before, signal.SIGKILL)
    until(lambda: ended(worker))  # with the one it was forked from
    assert ask(server, b"again") == b"again" and server.pid != before


def test_an_idle_worker_that_was_ended_is_replaced(server: ForkServer) -> None:
    idle = pid(server)
    os.kill(idle, signal.SIGKILL)
    until(lambda: ended(idle))
    assert ask(server, b"here") == b"here"


def test_nothing_is_left_behind(server: ForkServer) -> None:
    ask(server, b"warm")
    before, result = files(), 0
    for n in range(40):
        try:
            ask(server, (b"fine", b"fault", b"panic", b"abort")[n % 4])
        except WorkerFailed:
            result += 1
    assert result == 30
    assert files() <= before + 1
    until(lambda: len(children(server.pid or 0)) <= 1)  # the one that waits for work


def test_a_worker_let_go_is_ended(server: ForkServer) -> None:
    worker: Worker | None = server.open(LIMITS)
    assert worker is not None
    worker.send(b"pid")
    number = int(worker.receive().split()[0])
    worker = None
    until(lambda: ended(number))


PARENT = """
import sys, threading, time
sys.path.insert(0, {support!r})
from mtmd.base.isolation.fork_server import ForkServer
from mtmd.base.isolation.limits import NICE, NICEST, Limits
server = ForkServer("isolated_work")
idle, busy = server.open(Limits(60, 1 << 26)), server.open(Limits(60, 1 << 26))
for worker in (idle, busy):
    worker.send(b"pid")
    print(int(worker.receive().split()[0]))
busy.begin(Limits(60, 1 << 26))
busy.send(b"burn")
print(server.pid, flush=True)
{end}
"""


@pytest.mark.parametrize("end", ["time.sleep(60)", "", "raise SystemExit(3)"])
def test_all_end_with_the_process_that_started_them(end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(support=str(SUPPORT), end=end)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(3)]
    if "sleep" in end:
        assert not any(ended(p) for p in pids)
        process.kill()
    process.wait(30)
    process.stdout.close()
    until(lambda: all(ended(p) for p in pids))


def test_one_that_is_closed_starts_nothing() -> None:
    server = ForkServer("isolated_work")
    ask(server, b"warm")
    number = server.pid
    assert number is not None
    server.close()
    assert ended(number)
    with pytest.raises(MtmdError, match="closed"):
        ask(server, b"more")


def test_one_that_cannot_prepare_itself_is_an_error_that_passes() -> None:
    server = ForkServer("no_such_module_anywhere")
    with pytest.raises(MtmdError, match="no worker process could be had"):
        ask(server, b"x")


def test_a_forked_child_has_workers_of_its_own(server: ForkServer) -> None:
    worker = pid(server)  # and it waits for the next job
    assert server._idle
    reported = forked(lambda: (pid(server), server.close())[0])
    assert int(reported) != worker
    assert pid(server) == worker, "the parent's goes on"
