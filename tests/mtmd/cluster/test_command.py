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
from mtmd.batch.output_lock import output_lock
from mtmd.cluster.command import SOME_FAILED, exit_code
from mtmd.cluster.connect import PoolSize, needs_token, pool_size
from mtmd.cluster.progress import Progress, Reporter, duration
from mtmd.environment import guard_own_ray


def test_mistakes(one: Path, mtmd: Any, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    ray = ["--out", out, "--ray", "local"]
    for arguments, reported in (
        (["--out", out, "--actors", "2"], "--actors: found without --ray"),
        (["--out", out, "--name-column", "a"], "--name-column: found without --ray"),
        (["--out", "s3://bucket/rows.jsonl"], "found an address, expected a file without --ray"),
        ([*ray, "--unordered"], "--unordered: found with --ray"),
        ([*ray, "--every", "2s"], "--every: found with --ray"),
        (["--out", out, "--trust-tables"], "--trust-tables: found without --ray"),
        ([*ray, "--split", "layer"], "--split layer: found with --ray"),
        ([*ray, "--actors", "0"], "actors: found 0"),
        ([*ray, "--unit", "0"], "unit: found 0"),
        ([*ray, "--top-p", "2"], "--top-p: found 2"),
        ([*ray, "--parallel", "0"], "parallel"),
        (["--out", out, "--ray", "ray://host:10001"], "expected HOST:PORT"),
        (["--out", out, "--ray", "host"], "expected local, auto, or HOST:PORT"),
        (["--out", out, "--ray", "host:99999"], "expected local, auto, or HOST:PORT"),
    ):
        assert reported in mtmd("batch", one, *arguments).refused()
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
    reported = mtmd("batch", one, "--ray", "local", "--out", tmp_path / "a.jsonl").refused()
    assert "found no Ray, which is an extra; run `" in reported and "[ray]'" in reported


def test_a_second_command_is_refused_before_ray_starts(
    one: Path, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray = SimpleNamespace(__version__="2", exceptions=SimpleNamespace(RayError=RuntimeError))
    monkeypatch.setitem(sys.modules, "ray", ray)  # which need not be installed
    monkeypatch.setattr("mtmd.cluster.connect.connected", lambda _: pytest.fail("Ray starts"))
    out = tmp_path / "new" / "a.jsonl"
    out.parent.mkdir()
    with output_lock(out):
        reported = mtmd("batch", one, "--ray", "local", "--out", out).refused()
    assert f"another `mtmd batch` running there (process {os.getpid()} on" in reported
    assert not out.exists()


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
        reported = mtmd("batch", one, "--ray", address, "--out", tmp_path / "a.jsonl").refused()
    assert f"{address} does not answer (Connection refused)" in reported


def test_how_many_actors_fit() -> None:
    cpu, gpu = {"CPU": 8.0, "memory": 1e9}, {"CPU": 32.0, "GPU": 4.0}
    assert pool_size([cpu, cpu]) == PoolSize(2, 8, 0, 8)
    assert pool_size([{"memory": 1e9}, cpu]) == PoolSize(1, 8, 0, 8)  # a head that computes nothing
    assert pool_size([cpu, {"CPU": 16.0}]) == PoolSize(3, 8, 0, 8)
    assert pool_size([cpu, cpu], threads=2) == PoolSize(8, 2, 0, 2)
    assert pool_size([cpu, cpu], actors=4) == PoolSize(4, 4, 0, 4)
    assert pool_size([cpu, cpu], actors=3, threads=1) == PoolSize(3, 1, 0, 1)
    assert pool_size([cpu], tp=2) == PoolSize(1, 8, 0, 4)
    assert pool_size([cpu], tp=2, threads=2) == PoolSize(2, 4, 0, 2)
    assert pool_size([gpu, cpu]) == PoolSize(4, 8, 1, 8)
    assert pool_size([gpu, gpu], tp=2) == PoolSize(4, 8, 2, 8)
    assert pool_size([gpu, gpu], tp=8, actors=1, device="cuda") == PoolSize(1, 8, 8, 8)
    assert pool_size([{"CPU": 4.0, "GPU": 8.0}]) == PoolSize(4, 1, 1, 1)
    assert pool_size([gpu], device="cpu") == PoolSize(1, 32, 0, 32)
    assert pool_size([], actors=5, device="cuda").gpus == 1  # machines come when they are asked for
    assert (pool_size([gpu]).device, pool_size([cpu]).device) == ("cuda", "cpu")
    for nodes, options, reported in (
        ([cpu], {"device": "cuda"}, "1 machine with 8 CPUs and 0 GPUs, expected a machine with 1"),
        ([gpu], {"tp": 8, "device": "cuda"}, "expected a machine with 8 GPUs"),
        ([{"CPU": 8.0, "GPU": 8.0}], {"threads": 64}, "a machine with 1 GPUs and 64 CPUs"),
        ([{"GPU": 8.0}], {}, "a machine with 1 GPUs and 1 CPUs"),
        ([cpu, cpu], {"threads": 16}, "2 machines with 16 CPUs and 0 GPUs"),
        ([cpu], {"device": "cuda:1"}, "Ray says which GPU"),
    ):
        with pytest.raises(OptionError, match=reported):
            pool_size(nodes, **options)


def test_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(total=2000, before=400, written=0, failed=1, failed_before=2, actors=3)
    assert progress.line == "400 of 2,000 rows, 0.0 rows/s, 1,600 left; 3 actors; 3 failed"
    with Reporter(interval_s=0) as reporter:
        reporter.report(progress)
    with Reporter() as reporter:
        reporter.report(progress)  # not so soon
    assert capsys.readouterr().err == progress.line + "\n"
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
        assert needs_token(error)
    assert not needs_token(ConnectionError("Failed to connect to Ray cluster"))


def test_a_ray_of_ones_own_has_a_token_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    environment = {k: v for k, v in os.environ.items() if k not in names}
    monkeypatch.setattr(os, "environ", environment)
    guard_own_ray()
    assert environment["RAY_AUTH_MODE"] == "token" and len(environment["RAY_AUTH_TOKEN"]) == 64
    environment |= {"RAY_AUTH_TOKEN": "given"}
    guard_own_ray()
    assert environment["RAY_AUTH_TOKEN"] == "given"
