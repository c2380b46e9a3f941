"""The first minute with the command line: help that shows how, mistakes understood, pictures from
wherever they come, a shell that completes.
"""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtmd import cli
from mtmd.commands import completion
from mtmd.commands.argument_parser import Parser
from mtmd.loading import DEMO_MODEL, load
from mtmd.web.store.errors import StoreError

ROOT = Path(__file__).parents[3]
COUNT = "How many shapes are there?"


# help


def test_help_of_everything_has_examples_that_are_right(mtmd: Any) -> None:
    top = cli.parser()
    for verb in cli.VERBS:
        shown = mtmd("help", verb)
        assert shown == mtmd(verb, "--help") and shown.code == 0
        examples = shown.out.partition("\nexamples:\n")[2].partition("\n\n")[0].splitlines()
        assert examples, verb
        assert shown.out.lower().count("examples:") == 1, verb
        for line in examples:
            for command in line.split("|"):
                words = shlex.split(command, comments=True)
                if words[0] != "mtmd":
                    assert words[0] in ("curl", "ffmpeg", "find", "grep"), line
                    continue
                words = words[: words.index(">")] if ">" in words else words
                words = words[: words.index(">>")] if ">>" in words else words
                top.parse_args(words[1:])


MANY = 20  # options that --help shows at most


def test_the_short_help_shows_what_people_use(mtmd: Any) -> None:
    """Examples before the options, a line of usage, and how to see the rest."""
    verbs = cli.parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    for verb, module in cli.VERBS.items():
        sub, short, every = verbs[verb], mtmd(verb, "--help").out, mtmd(verb, "--help-all").out
        assert mtmd("help", verb, "--all").out == every, verb
        named = {name for action in sub._actions for name in action.option_strings}
        assert set(getattr(module, "SHORT", ())) <= named, verb
        options = [line for line in short.splitlines() if line.startswith("  -")]
        assert len(options) <= MANY, verb
        at = [short.find(word) for word in ("usage:", "examples:", "options:")]
        assert at == sorted(at), verb
        if hasattr(module, "SHORT"):
            assert short.startswith(f"usage: mtmd {verb} [OPTIONS]"), verb
            left = sum(line.startswith("  -") for line in every.splitlines()) - len(options)
            assert f"'mtmd {verb} --help-all' shows {left} more options." in short
        else:
            assert short == every, verb


@pytest.mark.parametrize("verb", ["info", "fit", "bench"])
def test_every_command_takes_its_model_by_an_option(verb: str, mtmd: Any) -> None:
    args = cli.parser().parse_args([verb, "-m", "there"])
    cli.settle_model(args)
    assert args.model == "there"
    assert "expected one model" in mtmd(verb, "demo", "-m", "demo").refused()


def test_both_models_of_a_comparison_by_options(mtmd: Any) -> None:
    for words in (["-m", "x", "-m", "y"], ["x", "y"], ["x", "-m", "y"]):
        args = cli.parser().parse_args(["compare", *words])
        cli.settle_model(args)
        assert (args.a, args.b) == ("x", "y"), words
    assert "expected two models" in mtmd("compare", "x", "y", "-m", "z").refused()


def test_no_command_tells_what_there_is(mtmd: Any) -> None:
    overview = mtmd()
    assert overview.code == 0 and overview == mtmd("help") == mtmd("--help")
    for verb, module in cli.VERBS.items():
        assert f"\n  {verb} " in overview.out
        assert " ".join(module.HELP.split()) in " ".join(overview.out.split())
    assert "examples:" in overview.out


@pytest.mark.parametrize("columns", [44, 80])
def test_help_fits_the_terminal(columns: int, mtmd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = mtmd("help").out.partition("examples:")[0].splitlines()
    assert max(map(len, lines)) <= columns


# mistakes


def test_a_misspelt_path_is_understood(
    mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "Holiday pictures"
    folder.mkdir()
    shutil.copy(one, folder / "beach.png")
    reported = mtmd("describe", "holiday picture/beech.png").refused()
    assert reported.endswith("did you mean 'Holiday pictures/beach.png'?")
    assert mtmd("describe", "zzz/qqq.png").refused().endswith("check the path")
    assert mtmd("describe", "zzz qqq.png").refused().endswith("check the path")
    assert mtmd("describe", "folder/nothing").refused().endswith("check the path")
    for words in ("What do you see here?", "how", "cats/dogs or birds?"):
        reported = mtmd("describe", one, words).refused()
        assert reported.endswith("check the path, or give it as the prompt")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "did you mean 'model.gguf'?" in mtmd("info", "modell.gguf").refused()


def test_a_data_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    from mtmd.commands.serve import _opened

    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError, match=rf"the data folder {file / 'data'} cannot be "):
        _opened(file / "data")


# pictures


def with_stdin(monkeypatch: pytest.MonkeyPatch, data: bytes, terminal: bool = False) -> None:
    stdin = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


def test_a_picture_from_a_pipe(mtmd: Any, one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_stdin(monkeypatch, one.read_bytes())
    assert mtmd("describe", "-", "-p", COUNT).out == "One.\n"
    with_stdin(monkeypatch, one.read_bytes()[:40])
    assert "standard input: found a truncated PNG" in mtmd("describe", "-").refused()
    with_stdin(monkeypatch, b"")
    assert "standard input: found nothing, expected a picture" in mtmd("describe", "-").refused()
    with_stdin(monkeypatch, b"", terminal=True)
    assert "standard input: found a terminal" in mtmd("describe", "-").refused()


def test_each_picture_by_itself(mtmd: Any, world: dict[int, Path], tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for n, path in world.items():
        shutil.copy(path, folder / f"{n}.png")
    (folder / "5.png").write_bytes(b"no picture")
    (folder / "6.png").symlink_to("nowhere")
    for name in ("a.txt", "b.txt", "notes", ".hidden"):
        (folder / name).touch()
    ran = mtmd("describe", "--each", folder, "-p", COUNT, "--max-tokens", 8)
    rows = [line.split("\t") for line in ran.out.splitlines()]
    assert [(Path(name).stem, text[:6]) for name, text in rows] == [
        ("1", "One."),
        ("2", "Two."),
        ("3", "Three."),
        ("4", "Four."),
        ("5", "failed"),
        ("6", "failed"),
    ]
    assert "found a link to a file that is not there" in rows[-1][1]
    assert "no.png: found no such file" in mtmd("describe", "--each", folder, "no.png").refused()
    assert ran.code == 1 and ran.err == (
        "skipped 3 files whose names do not end like a picture's: 2 .txt, 1 without an ending\n"
    )
    ran = mtmd("describe", "--each", world[1], world[2], "-p", COUNT, "--json")
    assert [json.loads(line)["text"] for line in ran.out.splitlines()] == ["One.", "Two."]


def test_a_table_fits_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    from mtmd.terminal.table import Table

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "44")
    table = Table(("image", "answer"), ["a/very/long/path/to/a/picture.png", "b.png"])
    table.add("a/very/long/path/to/a/picture.png", "word " * 20)
    table.add("b.png", "\x1b[31m")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 44 and lines[0].split() == ["image", "answer"]
    assert lines[1].startswith("…") and "picture.png  word word" in lines[1]
    assert "\x1b" not in "".join(lines)


def test_skipped_files_are_told_by_batch(mtmd: Any, one: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    shutil.copy(one, folder)
    (folder / "page.txt").touch()
    ran = mtmd("batch", folder, "--out", tmp_path / "a.jsonl", "-p", COUNT, "--system", "Be brief.")
    assert (
        ran.code == 0
        and "skipped a file whose name does not end like a picture's: 1 .txt" in ran.err
    )
    assert json.loads((tmp_path / "a.jsonl").read_text())["prompt_tokens"] > 23


# the terminal while one waits


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_is_shown_on_a_terminal_and_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    from mtmd.commands.shared import loading

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    with loading("org/name\x1b[2J"):
        assert screen.getvalue() == "\r\x1b[Kloading org/name\ufffd[2J ..."
    assert screen.getvalue().endswith("...\r\x1b[K")


# models by name


def test_the_demo_model_has_a_name(mtmd: Any, one: Path, tmp_path: Path, monkeypatch: Any) -> None:
    assert load("demo").name == "demo model"
    ran = mtmd("compare", "--dtype-b", "bf16", "--tokens", 2)
    assert ran.out.count("demo model") >= 2 and ran.err == ""
    assert mtmd("dump", one, "-m", "demo", "--filter", "mm.pool").out.startswith("encoder")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").symlink_to(DEMO_MODEL)
    assert load("demo").name == "demo_model", "the folder that is called so"


# the shell


def requested(line: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the shell is told about how `line` could go on."""
    out = io.StringIO()
    for name, value in {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
    }.items():
        monkeypatch.setenv(name, value)
    assert completion.is_requested()
    parser: Parser = cli.parser()

    class Left(Exception):
        pass

    def leave(_: int) -> None:
        raise Left

    def no_debugging(*_: Any) -> Any:  # it would take file 9, whosever that is
        raise OSError

    monkeypatch.setattr(os, "fdopen", no_debugging)

    import argcomplete

    with pytest.raises(Left):
        argcomplete.autocomplete(
            parser, always_complete_options=False, exit_method=leave, output_stream=out
        )
    return [word.strip() for word in out.getvalue().split("\n")]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mtmd desc", ["describe"]),
        ("mtmd describe --max", ["--max-frames", "--max-tokens"]),
        ("mtmd describe a.png --dtype b", ["bf16"]),
        ("mtmd warmup --flash-attn ", ["auto", "on", "off"]),
        ("mtmd completion f", ["fish"]),
        ("mtmd info org/", ["org/name:Q4_K_M"]),
    ],
)
def test_a_shell_is_told_how_a_line_goes_on(
    line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "mtmd.checkpoint.cached_models.names_here", lambda: ["org/name:Q4_K_M", "x/y"]
    )
    assert requested(line, monkeypatch) == expected


def test_the_scripts_of_the_shells(mtmd: Any) -> None:
    for shell in completion.SHELLS:
        ran = mtmd("completion", shell)
        assert ran.code == 0 and "mtmd" in ran.out
    assert "invalid choice" in mtmd("completion", "tcsh").refused()


def test_bash_completes(mtmd: Any, tmp_path: Path) -> None:
    """The script in a real shell, which calls the command as it would on TAB."""
    script = tmp_path / "completion.bash"
    script.write_text(mtmd("completion", "bash").out)
    command = tmp_path / "mtmd"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mtmd.cli "$@"\n')
    command.chmod(0o755)
    code = (
        f"source {script}; COMP_WORDS=(mtmd des); COMP_CWORD=1; COMP_LINE='mtmd des'; "
        "COMP_POINT=8; COMP_TYPE=9; COMP_KEY=9; _python_argcomplete mtmd des mtmd; "
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )
    assert done.stdout.split() == ["describe"]


# the warm-up


@pytest.mark.parametrize("columns", [44, 80])
def test_the_result_of_a_warm_up_comes_first_and_fits(columns: int) -> None:
    report = load(device="cpu", refuse="attention:head=72").warmup_report
    lines = report.text(columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("result: not fully") for line in lines[:5])


def test_a_guess_is_like_what_was_written(
    mtmd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ending makes no two names alike."""
    monkeypatch.chdir(tmp_path)
    for name in ("trunc.png", "beach.png"):
        (tmp_path / name).write_bytes(b"")
    assert "did you mean" not in mtmd("describe", "nosuch.png").refused()
    assert "did you mean 'beach.png'?" in mtmd("describe", "baech.png").refused()
    assert "did you mean 'beach.png'?" in mtmd("describe", "beach.pgn").refused()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with names")
def test_a_picture_from_a_pipe_with_a_name(mtmd: Any, one: Path, tmp_path: Path) -> None:
    """As a shell makes one of <(cat picture.png)."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(one.read_bytes()))
    writer.start()
    ran = mtmd("describe", pipe, "-p", COUNT, "--quiet")
    writer.join()
    assert (ran.code, ran.out) == (0, "One.\n")
