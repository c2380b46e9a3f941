"""What the pages say works as printed: every call of mtmd is one that it takes, those that need
nothing from elsewhere are run and say what stands below them, and so are the lines of Python.
"""

from __future__ import annotations

import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import model_table
import pytest

from mtmd import cli
from mtmd.cli import parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HISTORY = ("LOG.md",)  # tells what was tried with options of then
PRINTED: dict[str, str] = {}  # by calls, which several pages show
LINES_MAX = 150  # of the README
IMAGE_BYTES_MAX = 120_000
CALL = re.compile(r"^    (?:\$ )?(?P<line>(?:[^`\n]*\| ?)?mtmd [^\n]*)$", re.M)
SHOWN = re.compile(r"^    \$ (?P<line>[^\n]*mtmd [^\n]*)\n(?P<out>(?:    [^$\n][^\n]*\n)+)", re.M)


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def words_of(line: str) -> list[str]:
    """A shell's words of the call of mtmd in `line`, without what goes to a file."""
    words = shlex.split(line.rpartition("|")[2] if "|" in line else line, comments=True)
    for sign in (">", ">>"):
        words = words[: words.index(sign)] if sign in words else words
    return words[1:]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name not in HISTORY], ids=name_of)
def test_calls_of_mtmd_are_such_as_it_takes(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for result in CALL.finditer(page.read_text()):
        words = words_of(result["line"])
        if words[:1] == [cli.HELP]:
            continue
        try:
            parser().parse_args(words)
        except SystemExit as end:  # of `--help` with 0
            assert not end.code, f"{result['line']}: {capsys.readouterr().err}"


def shown() -> Iterator[tuple[str, str, str]]:
    for page in PAGES:
        for result in SHOWN.finditer(page.read_text()):
            yield name_of(page), result["line"], result["out"]


@pytest.mark.parametrize(("page", "line", "out"), list(shown()), ids=lambda text: str(text)[:60])
def test_what_is_shown_is_what_comes(
    page: str, line: str, out: str, mtmd_command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`...` stands for lines left out; numbers that are measured may be others."""
    assert page
    monkeypatch.chdir(ROOT)
    if line.startswith("cat "):
        data = Path(line.split()[1]).read_bytes()
        stdin = SimpleNamespace(buffer=io.BytesIO(data), isatty=lambda: False)
        monkeypatch.setattr(sys, "stdin", stdin)
    if line not in PRINTED:
        PRINTED[line] = mtmd_command(*words_of(line))
    printed = without_measures(PRINTED[line])
    for text in out.splitlines():
        if text.strip() != "...":
            assert without_measures(text.removeprefix("    ")) in printed, text


def without_measures(text: str) -> str:
    """Milliseconds, tokens a second, and what the machine has."""
    text = re.sub(r"waited [\d.]+ ms, ", "", text)  # on a busy machine
    text = re.sub(r"[\d,.]+ (ms|tokens/s)", r"N \1", text)
    return re.sub(r"\(\d+ threads?\)", "(N threads)", text)


@pytest.fixture
def mtmd_command(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    import torch

    from mtmd.kernels.resources.threads import ask_threads

    threads = torch.get_num_threads()

    def run(*words: str) -> str:
        capsys.readouterr()
        cli.main(words)
        return "".join(capsys.readouterr())

    yield run
    ask_threads(None)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_lines_of_python_print_what_their_comments_say(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S):
        if "openai" in code:  # tests/web/test_readme.py
            continue
        capsys.readouterr()
        exec(code, names)
        stated = " ".join(capsys.readouterr().out.split())
        location = 0
        for comment in re.findall(r"print\(.*?\)  # (.*)", code):
            for part in comment.split("..."):
                text = " ".join(part.split())
                assert text in stated[location:], (comment, stated)
                location = stated.index(text, location) + len(text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[\w-]+)?\)", text)
    links += re.findall(r'(?:src|srcset)="([^":]+)"', text)
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    pages = [p.name for p in (ROOT / "docs").glob("*.md") if p.name != "index.md"]
    assert [page for page in pages if f"]({page}" not in index] == []
    site = (ROOT / "tools" / "mkdocs.yml").read_text()  # `make docs` checks the rest of it
    assert [page for page in pages if f": {page}\n" not in site] == []
    assert (ROOT / "README.md").read_text().count("\n") <= LINES_MAX


def test_pictures_are_small_and_of_both_themes() -> None:
    images = {p.stem: p.stat().st_size for p in (ROOT / "docs" / "images").iterdir()}
    assert max(images.values()) < IMAGE_BYTES_MAX
    for name in images:
        assert name.replace("light", "dark") in images


def test_the_table_of_models_is_as_written_by_its_script() -> None:
    """A part of one row: all take a minute."""
    first = model_table.MODELS[0]
    cells = [model_table.as_gb(size) for size in model_table.memory(first.shape, "BF16")]
    row = f"| `{first.name}` | {' | '.join(cells)} |"
    page = model_table.PAGE.read_text()
    table = page.partition(model_table.BEGIN)[2].partition(model_table.END)[0]
    assert row in table, "run `python tools/model_table.py`"
    assert re.findall(r"^\| `([^`]+)`", table, re.M) == [m.name for m in model_table.MODELS]


@pytest.mark.parametrize("page", [ROOT / "CONTRIBUTING.md", *PAGES], ids=name_of)
def test_targets_and_scripts_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = re.findall(r"(?:^    |`)(?:\w+=\S+ )*make ([a-z]+)\b", text, re.M)
    assert set(named) <= targets
    scripts = re.findall(r"(?:python|sh) ((?:tools|benchmarks|tests)/[\w./-]+)", text)
    assert [script for script in scripts if not (ROOT / script).exists()] == []
