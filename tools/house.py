"""Count what says how easily this repository is read: lines of each room, files that one request
runs through, places where an option is declared, functions of many arguments, private words.

    .venv/bin/python tools/house.py                      # everything, of this repository
    .venv/bin/python tools/house.py --root ../other      # of another checkout, with its .venv
    .venv/bin/python tools/house.py --only lines words   # without running anything
    .venv/bin/python tools/house.py --check              # exit code 1 for a figure over its limit
"""

from __future__ import annotations

import argparse
import ast
import base64
import json
import mmap
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import words

ROOMS = ("kernels", "clip", "llm", "mtmd", "web")
OTHERS = ("tests", "tools", "benchmarks")
MANY_ARGUMENTS = 10
LIMITS = {"lines": 92_000, "chat": 70, "describe": 75, "declared": 1, "arguments": 0, "words": 0}
"""What `--check` compares the figures with."""
GENERATED = ("mtmd/options/keywords.py",)
OPTION_CLASSES = ("LoadOptions", "AnswerOptions", "ServerSettings")
SHARED_OPTIONS = 4
"""A class or function with so many names of options declares them."""
START_S = 120.0

TRACE = """
import sys as _sys, os as _os, mmap as _mmap, threading as _threading
def _house():
    folder, root = _os.environ["HOUSE_FOLDER"], _os.environ["HOUSE_ROOT"]
    file = open(_os.path.join(folder, "recording"), "rb")
    switch = _mmap.mmap(file.fileno(), 1, access=_mmap.ACCESS_READ)
    known, out = {}, []
    def profile(frame, event, argument):
        if switch[0] and event == "call":
            name = frame.f_code.co_filename
            if name not in known:
                known[name] = True
                if name.startswith(root):
                    pid = _os.getpid()
                    if not out or out[0] != pid:
                        path = _os.path.join(folder, "%d.files" % pid)
                        out[:] = pid, _os.open(path, _os.O_CREAT | _os.O_APPEND | _os.O_WRONLY)
                    _os.write(out[1], (name + "\\n").encode())
    _threading.setprofile(profile)
    _sys.setprofile(profile)
    _os.register_at_fork(after_in_child=known.clear)
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name == "gevent":  # greenlets have a profile function of their own
                _sys.meta_path.remove(self)
                import greenlet
                greenlet.settrace(lambda event, pair: _sys.setprofile(profile))
            return None
    _sys.meta_path.insert(0, Finder())
_house()
del _house
"""

DESCRIBE = """
import mtmd, sys
model = mtmd.load("demo")
for number in range(2):
    switch(number)
    model.describe(sys.argv[1], "What is this?", max_tokens=4)
switch(0)
"""


def python_files(root: Path, *folders: str) -> list[Path]:
    """Return the Python files that git knows below the folders."""
    command = ["git", "ls-files", "-z", *(f"{folder}/*.py" for folder in folders)]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.decode()
    return [root / name for name in names.split("\0") if name and (root / name).exists()]


def line_count(files: list[Path]) -> int:
    return sum(file.read_bytes().count(b"\n") for file in files)


def lines(root: Path) -> dict[str, int]:
    """Return the lines of Python of each room and of all."""
    counts = {room: line_count(python_files(root, room)) for room in (*ROOMS, *OTHERS)}
    return {"product": sum(counts[room] for room in ROOMS), **counts}


def trees(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for file in python_files(root, *ROOMS):
        yield file.relative_to(root).as_posix(), ast.parse(file.read_bytes())


def arguments(root: Path) -> dict[str, int]:
    """Return the functions with more arguments than a person keeps in mind, by file and line."""
    result = {}
    for name, tree in trees(root):
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                takes = node.args
                count = len(takes.posonlyargs) + len(takes.args) + len(takes.kwonlyargs)
                if count > MANY_ARGUMENTS:
                    result[f"{name}:{node.lineno} {node.name}"] = count
    return result


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Yield the names of functions, classes, arguments, variables and attributes of a module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def private_words(root: Path) -> dict[str, int]:
    """Return in how many names that files define each private word stands, a name once a file."""
    counts = Counter[str]()
    for name, tree in trees(root):
        for identifier in {*defined_names(tree), Path(name).stem}:
            counts.update(set(words.private_words(identifier, name)))
    return dict(counts.most_common())


def options(root: Path) -> dict[str, list[str]]:
    """Return where each option is declared: a field of a class, an argument of a command or of a
    function that takes several options. Options are the fields of the classes that hold them, and
    names of arguments of the command line that equal one.
    """
    parsed = [(file, tree) for file, tree in trees(root) if str(file) not in GENERATED]
    names = {
        field
        for _, tree in parsed
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name in OPTION_CLASSES
        for field in fields(node)
    }
    result = defaultdict(list)
    for file, tree in parsed:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name not in ("Receipt",):
                declared, where = [f for f in fields(node) if f in names], node.name
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                every = (*node.args.args, *node.args.kwonlyargs)
                declared, where = [a.arg for a in every if a.arg in names], node.name
            elif isinstance(node, ast.Call):
                declared, where = command_line_names(node, names), "add_argument"
                for name in declared:
                    result[name].append(f"{file}:{node.lineno} {where}")
                continue
            else:
                continue
            if len(declared) >= SHARED_OPTIONS:
                for name in declared:
                    result[name].append(f"{file}:{node.lineno} {where}")
    return dict(result)


def fields(node: ast.ClassDef) -> list[str]:
    return [
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    ]


def command_line_names(node: ast.Call, names: set[str]) -> list[str]:
    """Return the options that a call adds to a command's parser."""
    if not (isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument"):
        return []
    flags = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    every = {flag.lstrip("-").replace("-", "_") for flag in flags if flag.startswith("--")}
    return sorted((every | {name.removeprefix("no_") for name in every}) & names)


class Recording:
    """Records the files whose functions are called in processes that run with `program`.

    A switch in a file that all of them map says when: what runs while it is off is not recorded.
    """

    def __init__(self, folder: Path, root: Path):
        self.folder, self.root = folder, root
        (folder / "recording").write_bytes(b"\0")
        self._file = (folder / "recording").open("r+b")
        self._switch = mmap.mmap(self._file.fileno(), 1)
        python = root / ".venv" / "bin" / "python"
        if not python.exists():
            python = Path(sys.executable)
        (folder / "trace.py").write_text(TRACE)
        self._run = f"exec(compile(open({str(folder / 'trace.py')!r}).read(), 'trace', 'exec'))\n"
        self._wrapper = folder / "python"
        self._wrapper.write_text(
            f"#!{sys.executable} -IS\n"
            "import os, sys\n"
            "words = sys.argv[1:]\n"
            "if '-c' in words:\n"
            "    at = words.index('-c') + 1\n"
            f"    words[at] = {self._run!r} + words[at]\n"
            f"os.execv({str(python)!r}, [{str(python)!r}, *words])\n"
        )
        self._wrapper.chmod(0o755)
        self.environment = os.environ | {
            "HOUSE_FOLDER": str(folder),
            "HOUSE_ROOT": str(package_root(python, root)) + os.sep,
        }
        self.python = str(python)

    def switch(self, on: bool) -> None:
        self._switch[0] = 1 if on else 0

    def start(self, code: str, *words: str) -> subprocess.Popen[str]:
        """Start a process, and below it others, all of which are recorded."""
        begin = f"{self._run}import sys; sys.executable = {str(self._wrapper)!r}\n"
        return subprocess.Popen(
            [self.python, "-c", begin + code, *words],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=(self.folder / "log").open("w"),
            text=True,
            cwd=self.folder,
        )

    def files(self) -> dict[int, set[str]]:
        """Return the files that each process has run through, which are then forgotten."""
        result = {}
        for file in self.folder.glob("*.files"):
            result[int(file.stem)] = set(file.read_text().splitlines())
        return result


def package_root(python: Path, root: Path) -> Path:
    """Return the folder below which a checkout's Python runs its code."""
    code = "import mtmd, pathlib; print(pathlib.Path(mtmd.__file__).parents[1])"
    command = [str(python), "-c", code]
    text = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
    return Path(text.strip())


def describe(recording: Recording, picture: Path) -> int:
    """Return the number of files that a second `describe` runs through, in all processes."""
    switch = (
        "import mmap as m\n"
        f"f = open({str(recording.folder / 'recording')!r}, 'r+b')\n"
        "s = m.mmap(f.fileno(), 1)\n"
        "def switch(on): s[0] = on\n"
    )
    process = recording.start(switch + DESCRIBE, str(picture))
    process.communicate()
    if process.returncode:
        raise SystemExit((recording.folder / "log").read_text())
    return len(set[str]().union(*recording.files().values()))


@contextmanager
def served(recording: Recording) -> Iterator[tuple[int, str]]:
    """A server of the demo model: its process id and address."""
    run = "import runpy; sys.argv[0] = 'mtmd'; runpy.run_module('mtmd', run_name='__main__')"
    process = recording.start(run, "serve", "--port", "0", "--no-history")
    try:
        assert process.stdout
        for line in process.stdout:
            if match := re.search(r"^serving at (http://[^\s,]+)", line):
                yield process.pid, match[1]
                return
        raise SystemExit((recording.folder / "log").read_text())
    finally:
        process.terminate()
        process.communicate()


def ask(url: str, picture: Path) -> None:
    """Send one chat with a picture and read its stream to the end."""
    address = "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()
    body = {
        "stream": True,
        "max_tokens": 4,
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": address}},
                    {"type": "text", "text": "What is this?"},
                ],
            }
        ],
    }
    headers = {"Content-Type": "application/json"}
    data = json.dumps(body).encode()
    end = time.monotonic() + START_S
    while True:
        try:
            with urlopen(Request(f"{url}/v1/chat/completions", data, headers)) as response:
                assert b"[DONE]" in response.read()
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def chat(recording: Recording, picture: Path) -> tuple[int, int]:
    """Return how many files the second streamed chat with a picture runs through: in all
    processes, and in the one that clients reach.
    """
    with served(recording) as (server, url):
        ask(url, picture)
        recording.switch(True)
        ask(url, picture)
        recording.switch(False)
    files = recording.files()
    return len(set[str]().union(*files.values())), len(files.get(server, ()))


def main() -> int:
    options_ = parse()
    root = options_.root.resolve()
    figures: dict[str, int] = {}
    shown: dict[str, Callable[[], None]] = {
        "lines": lambda: show_lines(root, figures),
        "files": lambda: show_files(root, figures),
        "options": lambda: show_options(root, figures, options_.all),
        "arguments": lambda: show_arguments(root, figures, options_.all),
        "words": lambda: show_words(root, figures),
    }
    for name in options_.only or shown:
        shown[name]()
    over = {k: n for k, n in figures.items() if n > LIMITS[k]}
    if options_.check and over:
        print(*(f"{k} is {n}, expected at most {LIMITS[k]}" for k, n in over.items()), sep="\n")
        return 1
    return 0


def show_lines(root: Path, figures: dict[str, int]) -> None:
    counts = lines(root)
    figures["lines"] = counts["product"]
    print("lines of Python: " + ", ".join(f"{room} {n:,}" for room, n in counts.items()))


def show_files(root: Path, figures: dict[str, int]) -> None:
    picture = root / "examples" / "shapes.png"
    with tempfile.TemporaryDirectory() as folder:
        figures["describe"] = describe(Recording(Path(folder), root), picture)
    print(f"files that describe() runs through: {figures['describe']}")
    with tempfile.TemporaryDirectory() as folder:
        figures["chat"], web = chat(Recording(Path(folder), root), picture)
    print(
        f"files that a streamed chat with a picture runs through: {figures['chat']} in all "
        f"processes, {web} in the process that clients reach"
    )


def show_options(root: Path, figures: dict[str, int], all_: bool) -> None:
    declared = options(root)
    times = Counter(len(where) for where in declared.values())
    figures["declared"] = max(times)
    print(
        f"options: {len(declared)}, declared {sum(n * k for n, k in times.items())} times ("
        + ", ".join(f"{k} {n} times" for n, k in sorted(times.items()))
        + ")"
    )
    for name, where in sorted(declared.items()) if all_ else ():
        print(f"    {name}: {', '.join(where)}")


def show_arguments(root: Path, figures: dict[str, int], all_: bool) -> None:
    functions = arguments(root)
    figures["arguments"] = len(functions)
    print(
        f"functions with more than {MANY_ARGUMENTS} arguments: {len(functions)}, the most "
        f"{max(functions.values(), default=0)}"
    )
    for name, count in sorted(functions.items(), key=lambda item: -item[1]) if all_ else ():
        print(f"    {name}: {count}")


def show_words(root: Path, figures: dict[str, int]) -> None:
    counts = private_words(root)
    figures["words"] = sum(counts.values())
    print(
        f"private words in names that files define: {figures['words']}: "
        + ", ".join(f"{word} {n}" for word, n in counts.items())
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent)
    names = ("lines", "files", "options", "arguments", "words")
    parser.add_argument("--only", nargs="+", choices=names, help="these figures and no others")
    parser.add_argument("--all", action="store_true", help="with what is counted, one by one")
    parser.add_argument("--check", action="store_true", help="fail where one is over its limit")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
