"""Ranks as processes: the answers of one, and what becomes of those who wait when a rank is gone or
hangs.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Any

import pytest
from adapters import write_adapter
from processes import children
from random_graphs import device

from mtmd import DeviceError, OptionError, follower, load
from mtmd.base.group_signals import blocked_signals
from mtmd.cli import main
from mtmd.kernels.backends import Cpu
from mtmd.kernels.parallel import distributed
from mtmd.kernels.resources.threads import ask_threads
from mtmd.llm.engine.engine import Engine
from mtmd.llm.engine.prompt import Prompt
from mtmd.llm.sampling.sampler import Sampler, Sampling
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.ranks import leader, signs
from mtmd.ranks.meeting import KEY

EXAMPLES = Path(__file__).parents[3] / "examples"
SHAPES = EXAMPLES / "shapes.png"


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Model]:
    model = load(tp=2, speculate="off", lora={"a": write_adapter(tmp_path / "a")})
    yield model
    assert model.loaded.ranks
    model.close()
    model.loaded.ranks.close()
    ask_threads(None)


def processes(model: Model) -> list[int]:
    assert model.loaded.ranks
    return [f.process.pid for f in model.loaded.ranks.followers if f.process is not None]


def gone(pids: list[int]) -> bool:
    return not set(pids) & set(children(os.getpid()))


def test_answers_are_those_of_one_process(shared: Model, demo: Model) -> None:
    questions = ("Describe the image.", "How many shapes are there?")
    for question in questions:
        ours, one = (m.answer(SHAPES, question) for m in (shared, demo))
        assert ours.output_token_ids == one.output_token_ids
        assert "on each of 2 ranks" in str(ours.receipt) and ours.receipt.ranks == 2
    adapter = shared.checkpoint.adapters[0].path
    with load(lora=adapter) as merged:
        expected = merged.answer(SHAPES, questions[0], max_tokens=12)
    ours = shared.answer(SHAPES, questions[0], max_tokens=12, adapter="a")
    assert ours.output_token_ids == expected.output_token_ids != one.output_token_ids
    eight_at_random(shared, demo)
    with pytest.raises(DeviceError, match="one of several ranks already"):
        load(tp=2)
    report = shared.warm_up()
    assert report.ranks and len(report.ranks.ranks) == 2
    assert not any(check.failed for check in report.checks)
    text = str(report)
    assert "tensor parallelism: 2 ranks" in text and "all_reduce" in text
    pids = processes(shared)
    assert shared.loaded.ranks
    shared.close()
    shared.loaded.ranks.close()
    assert pids and gone(pids)


def eight_at_random(shared: Model, demo: Model) -> None:
    """Requests that come, are given up and make way for each other, over processes."""
    rng, subject = Random(3), Engine(shared.runner)
    spans = [
        demo.spans([{"role": "user", "content": [{"type": "image", "image": picture}]}])
        for picture in (SHAPES, EXAMPLES / "four.png")
    ]

    def prompt(number: int, count: int, owner: str = "a") -> Prompt:
        return Prompt(spans[number], Sampler(Sampling()), max_tokens=count, owner=owner)

    requested = []
    for at in range(8):  # the sixth is another client's, for whom one of four makes way
        number, count = at % 2, 40 if at < 5 else rng.choice((5, 20))
        sequence = subject.submit(prompt(number, count, "b" if at == 5 else "a"))
        requested.append((number, count, sequence))
        for _ in range(rng.choice((0, 1, 4))):
            subject.step()
        if at in (3, 6):
            subject.cancel(requested[at - 1][2])
    while subject.busy:
        subject.step()
    assert sum(s.preemptions for *_, s in requested) > 0
    alone = Engine(demo.runner)
    for number, count, sequence in requested:
        expected = alone.submit(prompt(number, count))
        while alone.busy:
            alone.step()
        cut = len(sequence.tokens) if sequence.finish == "cancelled" else None
        assert sequence.tokens == expected.tokens[:cut]
        assert sequence.finish in ("length", "cancelled")


def test_a_rank_outlives_what_a_terminal_and_systemd_send_to_all_and_its_end_ends_what_waits(
    shared: Model,
) -> None:
    answer = shared.describe(SHAPES)
    (pid,) = processes(shared)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    assert shared.describe(SHAPES) == answer and not gone([pid])
    events = shared.stream(
        [{"role": "user", "content": [{"type": "image", "image": SHAPES}]}], ignore_eos=True
    )
    next(events)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(DeviceError, match="rank 1 of 2 was ended by signal 9"):
        list(events)
    with pytest.raises(DeviceError, match="rank 1 of 2"):
        shared.describe(SHAPES)


def test_a_rank_that_is_killed_between_requests_is_a_fault(shared: Model) -> None:
    shared.describe(SHAPES)
    reported: SimpleQueue[DeviceError] = SimpleQueue()
    shared.service.on_fault(reported.put)
    os.kill(processes(shared)[0], signal.SIGKILL)
    with pytest.raises(DeviceError, match="signal 9"):
        shared.describe(SHAPES)
    assert "rank 1 of 2" in str(reported.get(timeout=60))  # after those who wait


def begun(location: bytes) -> subprocess.Popen[bytes]:
    """A rank as the first one starts it, told to end while it begins."""
    with blocked_signals():
        process = subprocess.Popen(
            [sys.executable, "-m", "mtmd.follower"], stdin=subprocess.PIPE, stderr=subprocess.PIPE
        )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        process.send_signal(number)
    assert process.stdin
    process.stdin.write(location)
    process.stdin.close()
    return process


def test_a_rank_whose_first_is_gone_before_they_meet_ends_without_a_word() -> None:
    with socket.socket() as taken:  # bound and not listening: who connects is refused
        taken.bind(("127.0.0.1", 0))
        location = {"address": list(taken.getsockname()), "key": "00" * 32, "rank": 1, "size": 2}
        for line in (json.dumps(location).encode() + b"\n", b""):
            with begun(line) as process:
                assert process.wait(120) == 0
                assert process.stderr and process.stderr.read() == b""


def test_a_rank_that_is_slow_is_waited_for_and_one_that_hangs_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(distributed, "WAIT_S", 3.0)  # of this rank
    model = load(tp=2, speculate="off")
    try:
        answer = model.describe(SHAPES)
        (pid,) = processes(model)
        os.kill(pid, signal.SIGSTOP)  # slow: it goes on before it is given up
        threading.Timer(0.5, os.kill, (pid, signal.SIGCONT)).start()
        assert model.describe(SHAPES) == answer
        os.kill(pid, signal.SIGSTOP)
        monkeypatch.setattr(distributed, "WAIT_S", 0.5)
        with pytest.raises(DeviceError, match=r"waited 0\.5 s for the others in vain"):
            model.describe(SHAPES)
        os.kill(pid, signal.SIGCONT)  # and it waits for us in vain, in its turn
        monkeypatch.setattr(leader, "END_S", 0.5)
        assert model.loaded.ranks
        model.close()
        model.loaded.ranks.close()
        assert gone([pid])
    finally:
        ask_threads(None)


def test_a_rank_that_is_stopped_before_it_is_ready(
    shared: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first run of a plan, in which ranks read weights and compile."""
    monkeypatch.setattr(signs, "SILENT_S", 2.0)
    reported: SimpleQueue[DeviceError] = SimpleQueue()
    shared.service.on_fault(reported.put)
    (pid,) = pids = processes(shared)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeviceError, match="rank 1 of 2 has not responded for 2 s"):
        shared.describe(SHAPES)
    assert "rank 1 of 2" in str(reported.get(timeout=60))  # after those who wait
    until_gone(pid)
    assert shared.loaded.ranks
    shared.close()
    shared.loaded.ranks.close()
    assert gone(pids)


def test_a_rank_that_is_stopped_in_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the first waits in gloo, which would wait ten minutes."""
    monkeypatch.setattr(leader, "new_memory", lambda _: None)
    wait = leader.Ranks._wait
    model = load(tp=2, speculate="off")
    (pid,) = processes(model)

    def stopped(self: leader.Ranks, kind: str) -> None:
        wait(self, kind)
        os.kill(pid, signal.SIGSTOP)

    monkeypatch.setattr(signs, "SILENT_S", 2.0)
    monkeypatch.setattr(leader.Ranks, "_wait", stopped)
    try:
        with pytest.raises(DeviceError, match="rank 1 of 2 has not responded for 2 s, last"):
            model.describe(SHAPES)
        assert model.loaded.ranks
        model.close()
        model.loaded.ranks.close()
        assert gone([pid])
    finally:
        ask_threads(None)


def test_a_rank_that_is_stopped_before_it_has_met_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signs, "SILENT_S", 2.0)
    report, started = leader.Ranks._report, list[int]()

    def stopped(self: leader.Ranks, kind: str, *args: Any, **head: Any) -> None:
        started.extend(process.pid for process in self._processes.values())
        os.kill(started[0], signal.SIGSTOP)
        report(self, kind, *args, **head)

    monkeypatch.setattr(leader.Ranks, "_report", stopped)
    try:
        with pytest.raises(DeviceError, match="rank 1 of 2 has not responded for 2 s"):
            load(tp=2, speculate="off")
        assert started and gone(started)
    finally:
        ask_threads(None)


def test_no_rank_outlives_the_first(tmp_path: Path) -> None:
    program = (
        "import os, signal, mtmd\n"
        "model = mtmd.load(tp=2)\n"
        "print(*[f.process.pid for f in model.loaded.ranks.followers], flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == -signal.SIGKILL
    (pid,) = map(int, run.stdout.split())
    until_gone(pid)


def until_gone(pid: int) -> None:
    for _ in range(2000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} has not ended")


def test_started_by_torchrun(tmp_path: Path) -> None:
    """Every rank is started alike; the first one answers."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "mtmd", "describe", str(SHAPES), "-p", "How many shapes are there?"]
    run = subprocess.run(
        [*command, "--tp", "2", "--quiet"], capture_output=True, text=True, cwd=tmp_path
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == ["Three."]


def test_a_rank_of_a_launcher_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the end of the interpreter, in which threads of gloo that are left abort it."""
    ended: list[int] = []

    def end(code: int) -> None:
        ended.append(code)
        raise SystemExit(code)

    class Store:
        def get(self, key: str) -> bytes:
            assert key == KEY
            return b"{}"

    monkeypatch.setattr(follower, "launcher_store", lambda *_: Store())
    monkeypatch.setattr(follower, "follow", lambda _, rank, *__: 0 if rank == 1 else 1)
    monkeypatch.setattr(os, "_exit", end)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(SystemExit):
        main(["describe", "x.png", "--tp", "2"])
    assert ended == [0]


def memories() -> int:
    """Descriptors that this process has of memory for ranks."""
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the listing itself
            count += "mtmd-ranks" in str(entry.readlink())
    return count


class GoneWire:
    def send(self, *_: object, **__: object) -> None:
        raise BrokenPipeError

    def shut(self) -> None:
        pass


@pytest.mark.parametrize("where", ["_start", "_accept"])
def test_a_rank_that_is_gone_before_it_loads(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told as such, and the memory for all of them is closed."""

    def start(*_: object) -> None:
        if where == "_start":
            raise DeviceError("rank 1 of 2 cannot be started")

    gone: Any = GoneWire()
    monkeypatch.setattr(leader.Ranks, "_start", start)
    monkeypatch.setattr(leader.Ranks, "_accept", lambda *_: [leader.Follower(1, gone, gone, None)])
    before = memories()
    with pytest.raises(DeviceError, match="rank 1 of 2 cannot be"):
        leader.Ranks(LoadOptions(tp=2), (), None)
    assert memories() == before


@pytest.mark.parametrize("chosen", [{"tp": 0}, {"tp": 65}, {"tp": 2, "tensor_split": (1,)}])
def test_wrong_options(chosen: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        load(**chosen)


def test_processes_that_are_not_one_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "x"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(OptionError, match="expected 3"):
        load(tp=2)


def test_keys_and_values_in_the_hosts_memory(demo: Model) -> None:
    chosen = LoadOptions(no_kv_offload=True, speculate="off")
    model = Model(demo.checkpoint, chosen, [device("card"), Cpu(native=False)])
    assert model.describe(SHAPES) == demo.describe(SHAPES)
    plan = model.runner.plan(model.runner.sizes()["decode"])
    saved = [s for s in plan.steps if s.node.op in ("kv_store", "attention", "gather_pages")]
    assert saved and {s.backend.space for s in saved} == {"cpu"}
    assert set(model.runner.cache_bytes()) == {"cpu"}
    others = {s.backend.space for s in plan.steps if s.node.op == "matmul"}
    assert others == {"card"}


def test_a_stranger_keeps_no_rank_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others on this machine connect first: one goes away, one does not know the key."""
    start = leader.Ranks._start

    def with_strangers(self: leader.Ranks, location: dict[str, Any]) -> Any:
        host, port = location["address"]
        socket.create_connection((host, port)).close()

        def guess() -> None:
            with suppress(AuthenticationError, OSError, EOFError):
                Client((host, port), authkey=b"a guess")

        threading.Thread(target=guess).start()
        return start(self, location)

    monkeypatch.setattr(leader.Ranks, "_start", with_strangers)
    model = load(tp=2, speculate="off")
    try:
        assert model.describe(SHAPES)
    finally:
        assert model.loaded.ranks
        model.close()
        model.loaded.ranks.close()
        ask_threads(None)
