"""`mtmd serve` tells mistakes before it says that it loads."""

from __future__ import annotations

import errno
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from mtmd import OptionError, cli
from mtmd.commands import serve


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (("--parallel", 0), "parallel: found 0"),
        (("--context", 0), "context: found 0"),
        (("-m", "nosuch"), "nosuch"),
        (("--mmproj", "none.gguf"), "none.gguf"),
    ],
    ids=lambda words: words[0] if isinstance(words, tuple) else "",
)
def test_mistakes_come_before_the_line_about_loading(
    words: tuple[Any, ...], reported: str, mtmd: Any, tmp_path: Path
) -> None:
    assert reported in mtmd("serve", "--port", 0, "--data", tmp_path, *words).refused()


@pytest.mark.parametrize("there", ["file", "file/below", "closed", "closed/below"])
def test_a_data_folder_that_cannot_be_had_is_told_before_a_model_is_loaded(
    there: str, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "closed").mkdir()
    access = os.access  # whoever runs the tests may write everywhere
    monkeypatch.setattr(os, "access", lambda p, mode: "closed" not in str(p) and access(p, mode))
    reported = mtmd("serve", "--port", 0, "--data", tmp_path / there).refused()
    why = "a file is in its place" if "file" in there else "read-only or belongs to another user"
    assert f"{tmp_path / there} cannot be opened, " in reported and why in reported
    assert "--no-history" in reported and not (tmp_path / "closed/below").exists()


@pytest.mark.parametrize("command", [("serve", "--port", 0), ("history", "check")])
def test_a_home_that_nobody_has_is_told(command: tuple[Any, ...], mtmd: Any) -> None:
    reported = mtmd(*command, "--data", "~no-such-user-here/x").refused()
    assert 'begins with "~"' in reported


@pytest.mark.parametrize("command", [("serve", "--port", 0), ("history", "check")])
def test_a_user_without_a_home_is_told(
    command: tuple[Any, ...], mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As containers have it that run as a number."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_DATA_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert "no home folder of this user" in mtmd(*command).refused()


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (OSError(errno.EADDRINUSE, ""), "another server is there"),
        (OSError(errno.EADDRNOTAVAIL, ""), "this machine has no such address"),
        (PermissionError(errno.EACCES, ""), "this user may not; choose a --port from 1024 on"),
        (socket.gaierror(socket.EAI_NONAME, ""), "this name has no address"),
        (OSError(errno.EAFNOSUPPORT, "Address family not supported"), "Address family not"),
    ],
    ids=str,
)
def test_why_an_address_cannot_be_had(
    error: OSError, reported: str, mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert reported in mtmd("serve", "--port", 0, "--data", tmp_path).refused()


def test_the_first_process_of_a_container_ends_when_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it loads a model: the system passes the signal over unless somebody takes it."""
    taken: dict[int, Any] = {}
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda number, what: taken.update({number: what}))
    cli._take_sigterm()
    assert not taken, "of other processes the system ends"
    monkeypatch.setattr(os, "getpid", lambda: 1)
    cli._take_sigterm()
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    taken[signal.SIGTERM](signal.SIGTERM, None)
    assert codes == [128 + signal.SIGTERM]


def test_the_log_has_its_form_before_anything_is_asked(
    mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    def load(*_: object) -> None:
        done.append("load")
        raise OptionError("x: found y")

    monkeypatch.setattr(serve, "_write_log", lambda _: done.append("log"))
    monkeypatch.setattr(serve, "_load", load)
    ran = mtmd("serve", "--port", 0, "--no-history")
    assert done == ["log", "load"] and (ran.code, ran.err) == (2, "mtmd serve: x: found y\n")


@pytest.mark.parametrize("word", ["--engine-process", "--no-engine-process"])
def test_an_option_that_does_nothing_any_more_is_accepted_and_told(
    word: str, mtmd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "_serve", lambda *_: None)
    ran = mtmd("serve", "--port", 0, "--no-history", word)
    assert ran.code == 0
    assert ran.err == (
        f"WARNING: {word} does nothing any more: each model has a process of its own\n"
    )
