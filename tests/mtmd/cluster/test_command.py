"""`mtmd batch --ray`: what is refused before anything is started, and what is told."""

from __future__ import annotations

import builtins
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtmd.base.errors import OptionError
from mtmd.cluster.command import SOME_FAILED, exit_code
from mtmd.cluster.connect import Seats, seats, wants_token
from mtmd.cluster.job import Progress
from mtmd.cluster.telling import Teller, duration, line
from mtmd.environment import guard_own_ray


def test_mistakes(one: Path, mtmd: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    ray = ["--out", out, "--ray", "local"]
    for arguments, told in (
        (["--out", out, "--actors", "2"], "--actors: found without --ray"),
        (["--out", out, "--name-column", "a"], "--name-column: found without --ray"),
        (["--out", "s3://bucket/rows.jsonl"], "found an address, expected a file without --ray"),
        ([*ray, "--unordered"], "--unordered: found beside --ray"),
        ([*ray, "--every", "2s"], "--every: found beside --ray"),
        (["--out", out, "--trust-tables"], "--trust-tables: found without --ray"),
        ([*ray, "--split", "layer"], "--split layer: found beside --ray"),
        ([*ray, "--actors", "0"], "actors: found 0"),
        ([*ray, "--unit", "0"], "unit: found 0"),
        ([*ray, "--top-p", "2"], "--top-p: found 2"),
        ([*ray, "--parallel", "0"], "parallel"),
        (["--out", out, "--ray", "ray://host:10001"], "expected HOST:PORT"),
        (["--out", out, "--ray", "host"], "expected local, auto, or HOST:PORT"),
        (["--out", out, "--ray", "host:99999"], "expected local, auto, or HOST:PORT"),
    ):
        assert told in mtmd("batch", one, *arguments).refused()
    assert not out.exists()


def test_ray_that_is_not_installed(
    one: Path, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name == "ray":
            raise ImportError(name)
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    told = mtmd("batch", one, "--ray", "local", "--out", tmp_path / "a.jsonl").refused()
    assert "found no Ray, which is an extra; run `" in told and "[ray]'" in told


def test_a_head_that_does_not_answer(
    one: Path, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ray:
        __version__ = "2"
        exceptions = SimpleNamespace(RayError=RuntimeError)

        @staticmethod
        def shutdown() -> None:
            pass

    monkeypatch.setitem(sys.modules, "ray", Ray)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        told = mtmd("batch", one, "--ray", address, "--out", tmp_path / "a.jsonl").refused()
    assert f"{address} does not answer (Connection refused)" in told


def test_how_many_actors_fit() -> None:
    cpu, gpu = {"CPU": 8.0, "memory": 1e9}, {"CPU": 32.0, "GPU": 4.0}
    assert seats([cpu, cpu]) == Seats(2, 8, 0, 8)
    assert seats([{"memory": 1e9}, cpu]) == Seats(1, 8, 0, 8)  # a head that computes nothing
    assert seats([cpu, {"CPU": 16.0}]) == Seats(3, 8, 0, 8)
    assert seats([cpu, cpu], threads=2) == Seats(8, 2, 0, 2)
    assert seats([cpu, cpu], actors=4) == Seats(4, 4, 0, 4)
    assert seats([cpu, cpu], actors=3, threads=1) == Seats(3, 1, 0, 1)
    assert seats([cpu], tp=2) == Seats(1, 8, 0, 4)
    assert seats([cpu], tp=2, threads=2) == Seats(2, 4, 0, 2)
    assert seats([gpu, cpu]) == Seats(4, 8, 1, 8)
    assert seats([gpu, gpu], tp=2) == Seats(4, 8, 2, 8)
    assert seats([gpu, gpu], tp=8, actors=1, device="cuda") == Seats(1, 8, 8, 8)
    assert seats([{"CPU": 4.0, "GPU": 8.0}]) == Seats(4, 1, 1, 1)
    assert seats([gpu], device="cpu") == Seats(1, 32, 0, 32)
    assert seats([], actors=5, device="cuda").gpus == 1  # machines come when they are asked for
    assert (seats([gpu]).device, seats([cpu]).device) == ("cuda", "cpu")
    for nodes, options, told in (
        ([cpu], {"device": "cuda"}, "1 machine with 8 CPUs and 0 GPUs, expected a machine with 1"),
        ([gpu], {"tp": 8, "device": "cuda"}, "expected a machine with 8 GPUs"),
        ([{"CPU": 8.0, "GPU": 8.0}], {"threads": 64}, "a machine with 1 GPUs and 64 CPUs"),
        ([{"GPU": 8.0}], {}, "a machine with 1 GPUs and 1 CPUs"),
        ([cpu, cpu], {"threads": 16}, "2 machines with 16 CPUs and 0 GPUs"),
        ([cpu], {"device": "cuda:1"}, "Ray says which GPU"),
    ):
        with pytest.raises(OptionError, match=told):
            seats(nodes, **options)


def test_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=2000, before=400, written=0, failed=1, failed_before=2, actors=3)
    assert line(progress) == "400 of 2,000 rows, 0.0 rows/s, 1,600 left; 3 actors; 3 failed"
    with Teller(every_s=0) as teller:
        teller.tell(progress)
    with Teller() as teller:
        teller.tell(progress)  # not so soon
    assert capsys.readouterr().err == line(progress) + "\n"
    assert [duration(s) for s in (0.4, 61, 7322, 200_000)] == [
        "0:00:00",
        "0:01:01",
        "2:02:02",
        "2.3 days",
    ]


def test_rows_with_errors_have_a_code_of_their_own() -> None:
    codes = [exit_code(Progress(failed=a, failed_before=b)) for a, b in ((0, 0), (1, 0), (0, 1))]
    assert codes == [0, SOME_FAILED, SOME_FAILED]
    assert SOME_FAILED not in (1, 2, 3, 70, 130)  # Python's for an exception, and others of ours


def test_a_cluster_that_wants_a_token_is_told_apart() -> None:
    class AuthenticationError(Exception):
        pass

    try:
        try:
            raise AuthenticationError
        except AuthenticationError as cause:
            raise ConnectionError("Failed to connect to Ray cluster") from cause
    except ConnectionError as error:
        assert wants_token(error)
    assert not wants_token(ConnectionError("Failed to connect to Ray cluster"))


def test_a_ray_of_ones_own_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    monkeypatch.setattr(os, "environ", environment)
    guard_own_ray()
    assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    environment |= {"RAY_AUTH_TOKEN": "given"}
    guard_own_ray()
    assert environment["RAY_AUTH_TOKEN"] == "given"
