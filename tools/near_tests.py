"""The test files nearest to what was changed, one a line, for `make check`.

    .venv/bin/python tools/near_tests.py                 # since the branch left main
    .venv/bin/python tools/near_tests.py --since HEAD~3

Of a changed test file, itself. Of a changed module, the tests in its mirrored folder of tests/ that
have its name or import it; where there are none, those elsewhere that import it, at most
`--maximum` of them. Of another file, such as a script of the page, those that have its name.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOMS = ("kernels", "clip", "llm", "mtmd", "web")  # packages of mtmd
SCRIPTS = ("tools", "benchmarks")  # imported by their bare names
MAIN = ("main", "origin/main")
MAXIMUM = 4
"""Of test files for a module that its own folder has none for."""


def near(root: Path, changed: Iterable[str], maximum: int = MAXIMUM) -> list[str]:
    """Return paths of test files below `root`, in the order of the changes."""
    tests = {path: path.read_text() for path in sorted((root / "tests").rglob("test_*.py"))}
    return list(
        dict.fromkeys(
            path.relative_to(root).as_posix()
            for file in changed
            for path in _near(root, Path(file), tests, maximum)
        )
    )


def _near(root: Path, file: Path, tests: dict[Path, str], maximum: int) -> Iterator[Path]:
    if root / file in tests:
        yield root / file
    if file.parts[0] not in (*ROOMS, *SCRIPTS):
        return
    folder = root / "tests" / file.parent
    named = folder / f"test_{file.stem}.py"
    importing = [path for path in tests if _imports(tests[path], module_of(file))]
    inside = [path for path in importing if path.parent == folder]
    if named in tests:
        yield named
    yield from inside
    if named not in tests and not inside:
        by_name = [path for path in tests if path.name == named.name]
        yield from [*by_name, *importing][:maximum]


def module_of(file: Path) -> str:
    """Return the name by which a file is imported; "" for one that is no module."""
    if file.suffix != ".py":
        return ""
    parts = file.with_suffix("").parts
    if parts[0] in SCRIPTS:
        return ".".join(parts[1:])
    parts = parts[:-1] if parts[-1] == "__init__" else parts
    return ".".join(parts if parts[0] == "mtmd" else ("mtmd", *parts))


def _imports(text: str, module: str) -> bool:
    if not module:
        return False
    package, _, name = module.rpartition(".")
    whole = rf"^\s*(?:from|import) {re.escape(module)}\b(?!\.)"
    part = rf"^\s*from {re.escape(package)} import (?:\([^)]*|[^(\n]*)\b{re.escape(name)}\b"
    return bool(re.search(f"{whole}|{part}" if package else whole, text, re.M))


def changed_files(root: Path, since: str | None) -> list[str]:
    """Return paths that git calls changed or new: since a commit, or since the branch left main;
    on main itself, since the last commit where nothing else was changed.
    """

    def git(*words: str) -> list[str]:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True)
        return done.stdout.splitlines()

    def listed(commit: str) -> list[str]:
        new = git("ls-files", "--others", "--exclude-standard")
        return git("diff", "--name-only", "--diff-filter=d", "--no-renames", commit) + new

    if since:
        return listed(since)
    known = set(git("for-each-ref", "--format=%(refname:short)"))
    for name in MAIN:
        if name in known:
            return listed(git("merge-base", "HEAD", name)[0]) or listed("HEAD~1")
    return listed("HEAD~1")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", metavar="COMMIT", help="default: where the branch left main")
    parser.add_argument("--maximum", type=int, default=MAXIMUM, metavar="N")
    chosen = parser.parse_args(arguments)
    root = Path(__file__).parents[1]
    for path in near(root, changed_files(root, chosen.since), chosen.maximum):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
