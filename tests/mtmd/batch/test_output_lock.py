"""Two commands on one file: the second is refused, unless the first is dead."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mtmd.base.errors import OptionError
from mtmd.batch import output_lock as module
from mtmd.batch.output_lock import output_lock

HOLDS = """
import sys
from pathlib import Path
from mtmd.batch.output_lock import output_lock
with output_lock(Path(sys.argv[1])) as note:
    print(note, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "answers.jsonl"


@pytest.fixture
def other(out: Path) -> Any:
    """Another process that has the file."""
    arguments = [sys.executable, "-c", HOLDS, str(out)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process
        process.kill()


def test_the_second_is_refused_with_the_first_by_name(out: Path, other: Any) -> None:
    for name in (out, out.parent / "." / out.name):
        with (
            pytest.raises(
                OptionError, match=rf"running there \(process {other.pid} on .*\), expected"
            ),
            output_lock(name),
        ):
            pass
    linked = out.with_name("link.jsonl")
    linked.symlink_to(out)
    with (
        pytest.raises(OptionError, match="found another `mtmd batch` running"),
        output_lock(linked),
    ):
        pass
    with output_lock(out.with_name("others.jsonl")) as note:
        assert note == ""
    other.kill()
    other.wait()
    with output_lock(out) as note:
        assert note.endswith(
            f"process {other.pid} on {os.uname().nodename} has ended without saying so; going on"
        )
        assert (
            json.loads(out.with_name("answers.jsonl.lock").read_bytes())["process"] == os.getpid()
        )
    assert sorted(p.name for p in out.parent.iterdir()) == ["link.jsonl"], "nothing stays"


def test_one_that_ends_makes_room_and_leaves_nothing(out: Path) -> None:
    for _ in range(2):
        with output_lock(out) as note:
            assert note == "" and out.with_name("answers.jsonl.lock").exists()
        assert not list(out.parent.iterdir())
    with pytest.raises(KeyboardInterrupt), output_lock(out):
        raise KeyboardInterrupt
    assert not list(out.parent.iterdir())


def test_a_lock_that_was_removed_while_it_was_waited_for_is_made_anew(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, path, removed = module.lock, out.with_name("answers.jsonl.lock"), []

    def late(file: Any, **options: Any) -> bool | None:
        if not removed:
            removed.append(path.unlink())
        return lock(file, **options)

    monkeypatch.setattr(module, "lock", late)
    with output_lock(out):
        assert removed and path.exists()
        with pytest.raises(OptionError), output_lock(out):
            pass


@pytest.mark.parametrize("data", [b"\xff[[[", b"[1]", b'{"name": "a"}', b"{}" * 2000])
def test_a_file_of_somebody_else_is_left_as_it_is(out: Path, data: bytes) -> None:
    path = out.with_name("answers.jsonl.lock")
    path.write_bytes(data)
    with (
        pytest.raises(OptionError, match="that is no lock of `mtmd batch`, expected"),
        output_lock(out),
    ):
        pass
    assert path.read_bytes() == data


@pytest.mark.parametrize("data", [b"", b"\0" * 60])
def test_what_a_machine_without_power_has_left_is_in_nobodys_way(out: Path, data: bytes) -> None:
    out.with_name("answers.jsonl.lock").write_bytes(data)
    with output_lock(out) as note:
        assert note == ""
    assert not list(out.parent.iterdir())


def test_no_link_is_followed_and_no_pipe_is_opened(out: Path) -> None:
    path, other = out.with_name("answers.jsonl.lock"), out.with_name("letter.txt")
    other.write_bytes(b"")
    path.symlink_to(other)
    with pytest.raises(OptionError, match="cannot be written beside it"), output_lock(out):
        pass
    assert other.read_bytes() == b"" and path.is_symlink()
    path.unlink()
    os.mkfifo(path)
    with (
        pytest.raises(OptionError, match=r"\(it is there, and no regular file\)"),
        output_lock(out),
    ):
        pass
    out.symlink_to(out)
    with pytest.raises(OptionError, match="found links in a circle"), output_lock(out):
        pass


def test_a_full_disk_leaves_nothing_and_an_end_in_a_folder_that_is_gone_is_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module.json, "dumps", full)
        with pytest.raises(OSError, match="No space"), output_lock(out):
            pass
    assert not list(out.parent.iterdir())
    out.parent.joinpath("away").mkdir()
    with pytest.raises(KeyboardInterrupt), output_lock(out.parent / "away" / out.name):
        out.parent.joinpath("away").rename(out.parent / "gone")
        raise KeyboardInterrupt


def test_a_file_system_without_locks_is_told(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", fails)
    with output_lock(out) as note:
        assert "this file system has no locks; see that no other command writes there" in note


def test_a_folder_that_may_not_be_written_is_told(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(module.os, "open", fails)
    with (
        pytest.raises(OptionError, match=r"cannot be written beside it \(Permission denied\)"),
        output_lock(out),
    ):
        pass


@pytest.mark.usefixtures("other")
def test_the_command_refuses_before_anything_is_loaded(out: Path, mtmd: Any, one: Path) -> None:
    ran = mtmd("batch", str(one), "--out", str(out), "-m", "org/nobody")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert ran.err.startswith(
        f"mtmd batch: --out {out}: found another `mtmd batch` running there ("
    )
    assert not out.exists()
