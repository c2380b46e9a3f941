"""`mtmd chat`: from a pipe, and at a terminal of its own."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clips import video
from PIL import Image

from mtmd.base.errors import ImageError, OptionError
from mtmd.base.options import options_of
from mtmd.loading import DEMO_MODEL
from mtmd.model import Model
from mtmd.options.answer import AnswerOptions
from mtmd.terminal.chat import CHANGED_MAX, HELP, NOT_HERE, Chat
from mtmd.terminal.line_input import _completion, leading_paths, texts, words_of
from mtmd.terminal.transcript import (
    Transcript,
    TranscriptError,
    Turn,
    attach,
    read_transcript,
    write_text,
)

COUNT = "How many shapes are there?"
NO_IMAGE = "I see no image. Please add one."


@pytest.fixture
def piped(mtmd: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`piped(lines, option, ...)`: the command with lines on stdin."""

    def run(lines: list[object], *arguments: object) -> Any:
        data = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogateescape")
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        return mtmd("chat", *arguments)

    return run


def test_answers_line_by_line(piped: Any, one: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise OptionError("found no home folder of this user")

    monkeypatch.setattr("mtmd.environment.data_folder", no_home)  # of no use for lines of a pipe
    ran = piped([f"/image '{one}'", COUNT, "", "/quit", COUNT])
    with Image.open(one) as image:
        size = f"{image.width} x {image.height}"
    assert (ran.code, ran.out, ran.err) == (0, f"attached: {one} ({size})\nOne.\n", "")


@pytest.mark.parametrize("word", ["/exit", "/bye"])
def test_words_of_other_programs_leave(piped: Any, word: str) -> None:
    ran = piped([word, COUNT])
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_a_video_is_attached_and_kept_with_the_conversation(piped: Any, tmp_path: Path) -> None:
    path, saved = tmp_path / "clip.mp4", tmp_path / "saved.json"
    path.write_bytes(video(24))
    ran = piped([path, "What moves?", "/receipt", f"/save {saved}"], "--max-tokens", 1)
    assert f"attached: {path} (96 x 64, 2.0 s)\n" in ran.out and "video 1: 2.0 s of" in ran.out
    again = piped([f"/load {saved}", "/images"], "--max-tokens", 1)
    assert f"{path} (96 x 64, 2.0 s)" in again.out and again.code == 0


def test_images_as_arguments_and_dropped(
    piped: Any, world: dict[int, Path], tmp_path: Path
) -> None:
    blank = tmp_path / "a b.png"
    blank.write_bytes(world[3].read_bytes())
    assert piped([COUNT], world[2]).out == "Two.\n"
    for dropped in (f"'{blank}'", f'"{blank}"', str(blank).replace(" ", "\\ "), blank.as_uri()):
        assert piped([f"{dropped} {COUNT}"]).out.splitlines()[1:] == ["Three."], dropped
        assert piped([f"{dropped} ", COUNT]).out.splitlines()[1:] == ["Three."], dropped


def test_errors_are_one_line_and_it_goes_on(piped: Any, one: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_text("no picture")
    lines = [
        "/image",
        "/image none.png",
        f"/image {one} {tmp_path / 'bad.png'}",
        "/fly",
        "/receipt",
        "/undo",
        "/retry",
        "/set colour 3",
        "/set top_p 2",
        "/set json_schema {",
        "/save a.txt",
        f"/save {tmp_path / 'none' / 'a.json'}",
        "/load none.json",
        "\udcff",
        "/images",
    ]
    ran = piped([*lines, COUNT])
    reported = ran.err.splitlines()
    assert ran.code == 1 and ran.out == f"no image; /image PATH attaches one\n{NO_IMAGE}\n"
    assert len(reported) == len(lines) - 1 and all(
        line.startswith("mtmd chat: ") and line.isprintable() for line in reported
    ), reported
    expected = (
        "found no path",
        "none.png: found no such file",
        "bad.png",
        "/fly is not a command",
        "no answer",
        "there is no question",
        "there is no question",
        "'colour' is not known",
        "top_p: found 2",
        "json_schema",
        "expected a file ending in .json or .md",
        "cannot be written",
        "cannot be read",
        "not valid Unicode",
    )
    for line, words in zip(reported, expected, strict=True):
        assert words in line, line


def test_a_question_that_begins_with_a_slash(piped: Any) -> None:
    assert piped([" /what is this?"]).out == f"{NO_IMAGE}\n"


def test_several_lines(piped: Any) -> None:
    assert list(entered('"""\na\n\nb"""\nc\\\nd\n"""e"""\n"""open\nend')) == [
        "a\n\nb",
        "c\nd",
        "e",
        "open\nend",
    ]
    ran = piped(['"""How many', 'shapes are there?"""', "/undo"])
    assert ran.out.endswith("taken back: How many\nshapes are there?\n") and ran.code == 0


def entered(data: str) -> Iterator[str]:
    before, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(data.encode()))
    try:
        yield from texts("> ", False)
    finally:
        sys.stdin = before


def test_options(piped: Any, one: Path) -> None:
    ran = piped(
        [
            COUNT,
            "/set max_tokens 2",
            COUNT,
            "/set max_tokens default",
            "/set stop At",
            "/set json_schema true",
            "/set json_schema",
            COUNT,
            "/set",
            "/set all",
        ],
        one,
        "--max-tokens",
        3,
    )
    stated = ran.out.splitlines()
    assert (
        "max_tokens 2" in stated
        and "max_tokens -1 (to the end of the context)" in stated
        and 'stop ["At"]' in stated
    )
    assert stated.count('json_schema "{\\"type\\": \\"object\\"}"') == 3
    assert stated[0] == "One." and "(ended at 2 tokens; /set max_tokens N allows more)" in ran.err
    first = stated.index("temperature 0.0")
    assert [line.split()[0] for line in stated[first : first + 6]] == [*CHANGED_MAX]
    settings = stated[stated.index("temperature 0.0", first + 1) :]
    assert stated[first + 6] == (
        f"(/set all shows {len(settings) - 6} more, such as stop and json_schema)"
    )
    assert [line.split()[0] for line in settings] == [
        name for name in options_of(AnswerOptions) if name not in NOT_HERE
    ]
    answer = "\n".join(stated[7 : stated.index("temperature 0.0")])
    assert isinstance(json.loads(answer), dict)


def test_settings_of_the_model_hold_and_are_shown(piped: Any, one: Path, tmp_path: Path) -> None:
    folder = tmp_path / "sampled"
    shutil.copytree(DEMO_MODEL, folder)
    path = folder / "generation_config.json"
    chosen = {"do_sample": True, "temperature": 0.6, "top_k": 3}
    path.write_text(json.dumps(json.loads(path.read_text()) | chosen))
    lines = ["/set", COUNT, "/receipt", "/set temperature 0", "/set top_k 5", COUNT, "/receipt"]
    ran = piped(lines, one, "-m", folder, "--seed", 1)
    assert "temperature 0.6 (generation_config.json)\n" in ran.out
    assert "top_k 3 (generation_config.json)\n" in ran.out
    assert "sampling: temperature 0.6, top_k 3 from generation_config.json\n" in ran.out
    assert "top_k 5 (no effect at temperature 0, which uses the most probable" in ran.out
    assert "sampling: temperature 0 as requested\n" in ran.out


def test_a_path_with_blanks_needs_no_quotation_marks(piped: Any, one: Path, tmp_path: Path) -> None:
    path = tmp_path / "my picture of it.png"
    path.write_bytes(one.read_bytes())
    ran = piped([f"/image {path}", COUNT])
    assert f"attached: {path} (" in ran.out and (ran.code, ran.err) == (0, "")


def test_a_loop_is_said(piped: Any, demo: Model) -> None:
    token = demo.service.tokens_of("a")[0]
    lines = [f'/set logit_bias {{"{token}": 100}}', "/set max_tokens 200", COUNT]
    ran = piped([*lines, "/set stop_repeating true", COUNT], "--ignore-eos")
    assert "(the last 200 tokens say the same again and again; /set" in ran.err
    assert "(stopped, as the last 96 tokens say the same)\n" in ran.err


def chat(model: Model, *lines: object, **chosen: Any) -> Chat:
    subject = Chat(model, chosen)
    for line in lines:
        assert subject.enter(str(line))
    return subject


def test_pictures_stay_and_turns_are_quick(
    demo: Model, one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subject = chat(demo, f"/image {one}", COUNT, "Describe the image.", "/images", "/receipt")
    assert not subject.failed and subject.last is not None and subject.attached == []
    stated = capsys.readouterr().out
    assert f"question 1: {one}" in stated and "from the cache" in stated.splitlines()[-2]
    assert (
        len(subject.last.images) == 1
        and subject.last.images[0].cached
        and subject.last.reused_tokens >= 32
    )
    assert [m["role"] for m in subject.transcript.messages()] == ["user", "assistant", "user"]


def test_undo_retry_clear(demo: Model, world: dict[int, Path]) -> None:
    subject = chat(demo, f"/image {world[1]}", COUNT, "/undo")
    assert [a.path for a in subject.attached] == [world[1]] and subject.transcript.turns == []
    chat_again = [subject.enter(line) for line in (COUNT, f"/image {world[2]}", "/retry")]
    assert chat_again == [True] * 3 and [t.answer for t in subject.transcript.turns] == ["One."]
    assert [a.path for a in subject.attached] == [world[2]], (
        "what is attached waits for the next question"
    )
    subject.enter("/system Be brief.")
    assert subject.transcript.messages()[0] == {"role": "system", "content": "Be brief."}
    subject.enter("/clear")
    assert (
        subject.transcript == Transcript("Be brief.")
        and subject.attached == []
        and subject.last is None
    )
    subject.enter("/system")
    assert subject.transcript == Transcript() and not subject.failed


def test_what_fails_was_not_asked(
    demo: Model, one: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = chat(demo, f"/image {one}", "x " * 9000)
    assert "tokens" in capsys.readouterr().err and subject.failed
    assert subject.transcript.turns == [] and [a.path for a in subject.attached] == [one]
    subject.enter(COUNT)
    subject.chosen = {"json_schema": True, "ignore_eos": True}
    subject.enter("/retry")
    assert (
        [t.answer for t in subject.transcript.turns] == ["One."]
        and subject.last is not None
        and subject.attached == []
    )
    monkeypatch.setattr(demo.loaded, "encoder", None)
    subject.enter(f"/image {one}")
    assert "no image encoder" in capsys.readouterr().err


def test_save_and_load(
    demo: Model, world: dict[int, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "my picture.png"
    picture.write_bytes(world[2].read_bytes())
    saved, read = tmp_path / "a b.json", tmp_path / "a.md"
    subject = chat(
        demo,
        "/system Be brief.",
        f"/image '{picture}'",
        COUNT,
        "And now?",
        f"/save '{saved}'",
        f'/save "{read}"',
        "/set seed 3",
        f"/save '{saved}'",
    )
    assert not subject.failed and sorted(tmp_path.iterdir()) == sorted([picture, saved, read])
    assert read.read_text().split("\n\n") == [
        "# Conversation with demo model",
        "> Be brief.",
        f"![my picture.png](<{picture}>)",
        f"**You:** {COUNT}",
        "Two.",
        "**You:** And now?",
        f"{subject.transcript.turns[1].answer}\n",
    ]
    other = chat(demo, f"/load '{saved}'", f"/save '{saved}'")
    assert not other.failed and other.chosen == {"seed": 3}
    assert (
        other.transcript.messages()[1]["content"][1:]
        == subject.transcript.messages()[1]["content"][1:]
    )
    assert [(t.question, t.answer) for t in other.transcript.turns] == [
        (t.question, t.answer) for t in subject.transcript.turns
    ]
    capsys.readouterr()
    stranger = chat(demo, COUNT, f"/save '{saved}'")
    assert stranger.failed and "a file there already" in capsys.readouterr().err
    picture.write_bytes(world[3].read_bytes())
    changed = chat(demo, f"/load '{saved}'")
    assert (
        "is another picture now" in capsys.readouterr().err and len(changed.transcript.turns) == 2
    )
    picture.unlink()
    retained = chat(demo, "/system Here.", f"/load '{saved}'")
    assert (
        retained.transcript == Transcript("Here.")
        and "is not there any more" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("[", "not JSON"),
        ("[]", "no conversation of version 1"),
        ('{"format": "mtmd chat", "version": 2}', "of version 1"),
        ('{"format": "mtmd chat", "version": 1}', "KeyError 'turns'"),
        (
            '{"format": "mtmd chat", "version": 1, "turns": [{"question": 3, "images": []}]}',
            "where a text should be",
        ),
        ('{"format": "mtmd chat", "version": 1, "turns": 3}', "where a list should be"),
    ],
)
def test_what_is_no_conversation_is_refused(text: str, reported: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(TranscriptError, match=reported):
        read_transcript(tmp_path / "a.json")


def test_a_lost_picture_is_an_image_error(one: Path, tmp_path: Path) -> None:
    text = (
        Transcript("", [Turn("?", (attach(one),), "!")])
        .to_json("m", {})
        .replace(one.name, "gone.png")
    )
    write_text(tmp_path / "a.json", text)
    with pytest.raises(ImageError, match=r"not there any more: .*gone\.png: found no such file"):
        read_transcript(tmp_path / "a.json")


def test_what_a_model_writes_cannot_command_the_terminal(
    demo: Model, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_text(
        tmp_path / "a.json", Transcript("", [Turn("\x1b[2Jq", (), "\x1b]0;t\x07")]).to_json("m", {})
    )
    chat(demo, f"/load {tmp_path / 'a.json'}", "/undo")
    assert capsys.readouterr().out == "loaded: 1 question\ntaken back: \ufffd[2Jq\n"


def test_words_and_leading_paths(tmp_path: Path) -> None:
    assert words_of("a 'b c' \"d e\" f\\ g it's 'open") == [
        "a",
        "b c",
        "d e",
        "f g",
        "it's",
        "'open",
    ]
    first, second = tmp_path / "a b.png", tmp_path / "c.JPG"
    first.touch()
    second.touch()
    assert leading_paths(f"'{first}' {second} what's this? {first}", (".png", ".jpg")) == (
        [first, second],
        f"what's this? {first}",
    )
    for text in (
        "c.JPG is it?",
        f"{tmp_path}/none.png",
        str(tmp_path),
        "'",
        "",
        "/" + "x" * 5000 + ".png",
        "\0.png",
    ):
        assert leading_paths(text, (".png", ".jpg")) == ([], text.strip())


def test_completion(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pick.png").touch()

    def all_of(start: str) -> list[str]:
        result, n = [], 0
        while (word := _completion(start, n, ["/image", "/images", "/quit"])) is not None:
            result.append(word)
            n += 1
        return result

    assert (
        all_of("/im") == ["/image ", "/images "]
        and all_of("") == []
        and all_of(f"{tmp_path}/none/x") == []
    )
    assert all_of(f"{tmp_path}/pic") == [f"{tmp_path}/pick.png ", f"{tmp_path}/pictures/"]


LAUNCH = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, sys.argv[1:])"
)


class Terminal:
    """`mtmd chat` with a terminal of its own."""

    def __init__(self, home: Path, *arguments: object):
        self.ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 40, 400, 0, 0))
        command = [
            sys.executable,
            "-c",
            LAUNCH,
            sys.executable,
            "-m",
            "mtmd.cli",
            "chat",
            *map(str, arguments),
        ]
        env = {**os.environ, "XDG_DATA_HOME": str(home), "TERM": "xterm", "HOME": str(home)}
        self.process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=env)
        os.close(its)
        self.shown = ""

    def until(self, pattern: str, seconds: float = 60) -> str:
        """What is shown up to the pattern, which is then done with."""
        end = time.monotonic() + seconds
        while (match := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < end, f"{pattern!r} did not come: {self.shown!r}"
            if select.select([self.ours], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.ours, 4096).decode(errors="replace")
                except OSError as error:  # the other side is closed
                    raise AssertionError(f"it ended: {self.shown!r}") from error
        before, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return before

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())

    def end(self) -> int:
        try:
            while os.read(self.ours, 4096):
                pass
        except OSError:
            pass
        return self.process.wait(60)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Any]:
    opened: list[Terminal] = []

    def start(*arguments: object) -> Terminal:
        opened.append(Terminal(tmp_path, *arguments))
        opened[-1].until(r"/help lists the commands, Ctrl-D quits\r\n")
        opened[-1].until("> ")
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_at_a_terminal(terminal: Any, one: Path, tmp_path: Path) -> None:
    subject = terminal(one, "--ignore-eos", "--max-tokens", 4000)
    subject.type(f"{COUNT}\r")
    subject.until(r"One\.")
    subject.type("\x03")
    subject.until("\r\n.*> ")
    subject.type("/set ignore_eos false\r")
    subject.until("ignore_eos false.*\r\n.*> ")
    subject.type("/receipt\r")
    assert "output tokens (cancelled)" in subject.until("fp32; .*\r\n.*> ")
    subject.type("to be taken back")
    subject.until("taken back")
    # As long as a hand takes: CPython's readline misses a signal that comes while it echoes a key,
    # until the next key.
    time.sleep(0.5)
    subject.type("\x03")
    subject.until("> ")
    subject.type(f"{COUNT}\r")
    subject.until(r"\?\r\n")
    assert re.search(r"[A-Z].*\.\r\n", subject.until("\r\n.*> "))
    subject.type("/he\t\r")
    assert all(
        f"/{name} " in reported
        for reported in [subject.until("several lines.\r\n.*> ")]
        for name in HELP
    )
    subject.type("\x04")
    assert subject.end() == 0
    file = tmp_path / "mtmd" / "chat_history"
    assert (
        file.read_text().splitlines()[:2] == [COUNT, "/set ignore_eos false"]
        and file.stat().st_mode & 0o077 == 0
    )


def test_history_comes_back(terminal: Any, tmp_path: Path) -> None:
    (tmp_path / "mtmd").mkdir()
    (tmp_path / "mtmd" / "chat_history").write_text(f"{COUNT}\n")
    subject = terminal()
    subject.type("\x1b[A\r")
    subject.until(re.escape(NO_IMAGE))
    subject.type("/quit\r")
    assert subject.end() == 0


def test_no_history(terminal: Any, tmp_path: Path) -> None:
    subject = terminal("--no-history")
    subject.type("/images\r")
    subject.until("no image; ")
    subject.type("/quit\r")
    assert subject.end() == 0 and list(tmp_path.iterdir()) == []


def test_a_wrong_option_or_image_ends_it_at_once(mtmd: Any, one: Path) -> None:
    assert (
        "--top-p: found 2" in mtmd("chat", "--top-p", 2).refused()
        and "no such file" in mtmd("chat", one, "none.png").refused()
    )
