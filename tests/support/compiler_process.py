"""A process in which kernels are compiled for GPUs that are not here, as the tests' own interprets
them. One answers all questions: it takes longer to import Triton than to compile most kernels.

Run as a script it is that process: a line of JSON on the standard input has Python code and the
names it is given, and a line on the standard output says what the code left in `out`.

What `compile_program` says of a program depends on the kernel's source, the options and the version
of Triton alone. `tests/kernels/gpu/compiled.txt` has it by a digest of these, so that a program is
compiled only after one of them has changed. One in 32 is compiled all the same, others after every
change of the file, and has to be as recorded. `pytest --record-compiled` writes the file anew.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[2] / "tools"
RECORD = Path(__file__).parents[1] / "kernels" / "gpu" / "compiled.txt"
RECORDING = "--record"
SAMPLED = 32
LIMIT_S = 600
Sizes = tuple[int, int, int, str]
PRINTED = """
import contextlib, importlib, io, sys
sys.path.insert(0, folder)
with contextlib.redirect_stdout(io.StringIO()) as lines:
    assert importlib.import_module(name).main(arguments) == 0
out = lines.getvalue().splitlines()
"""


class Compiler:
    def __init__(self, process: subprocess.Popen[str], errors: Any):
        self.process, self.errors = process, errors

    def __call__(self, code: str, **given: Any) -> Any:
        """`out` of the code. AssertionError with the process' words where it raises, or ends."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps({"code": code, "given": given}) + "\n")
        self.process.stdin.flush()
        answered, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
        line = self.process.stdout.readline() if answered else ""
        if not line:
            self.process.kill()
            self.errors.seek(0)
            raise AssertionError(f"no answer in {LIMIT_S} s, or ended: {self.errors.read()}")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["out"]

    def printed(self, script: Path, *arguments: str) -> list[str]:
        """The lines that the `main` of a script prints."""
        folder, name = str(script.parent), script.stem
        result: list[str] = self(PRINTED, folder=folder, name=name, arguments=arguments)
        return result


class Record:
    """What was read of compiled programs, by key. `check` compiles some that are known."""

    def __init__(self, text: str):
        self.known: dict[str, Sizes] = {}
        self.requested: set[str] = set()
        for line in text.splitlines():
            key, shared, registers, spilled, instruction = line.split()
            self.known[key] = int(shared), int(registers), int(spilled), instruction
        self._seed = hashlib.sha256(text.encode()).hexdigest()

    def is_sampled(self, key: str) -> bool:
        digest = hashlib.sha256((self._seed + key).encode()).digest()
        return int.from_bytes(digest) % SAMPLED == 0

    def sizes(self, key: str, compiled: Callable[[], Sizes]) -> Sizes:
        """Raises AssertionError where a sampled program is not as recorded."""
        self.requested.add(key)
        if key not in self.known:
            self.known[key] = compiled()
        elif self.is_sampled(key):
            actual = compiled()
            assert actual == self.known[key], (
                f"{RECORD.name}, {key}: {self.known[key]}, and the compiler says {actual}: run "
                "pytest --record-compiled tests/kernels/gpu"
            )
        return self.known[key]

    def __str__(self) -> str:
        rows = (" ".join(map(str, (key, *self.known[key]))) for key in sorted(self.requested))
        return "".join(f"{row}\n" for row in rows)


def use_record(recording: bool) -> None:
    """Have `compile_program` look into the record first, or write it when this process ends."""
    import triton

    from mtmd.kernels.gpu import compile as aot

    record = Record("" if recording or not RECORD.exists() else RECORD.read_text())
    compiled = aot.compiled_sizes

    def sizes(target: str, program: Any) -> Sizes:
        parts = (triton.__version__, target, *aot.cache_key(target, program))
        key = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:24]
        return record.sizes(key, lambda: compiled(target, program))

    aot.compiled_sizes = sizes
    if recording:
        atexit.register(lambda: RECORD.write_text(str(record)))


@contextmanager
def started(recording: bool = False) -> Iterator[Compiler]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__, *[RECORDING] * recording],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=env | {"PYTHONPATH": str(TOOLS)},
        )
        with process:
            yield Compiler(process, errors)


def answer(line: str) -> dict[str, Any]:
    requested = json.loads(line)
    names = {"__name__": "compiled", **requested["given"]}
    try:
        exec(requested["code"], names)
        return {"out": names["out"]}
    except BaseException:
        return {"error": traceback.format_exc()}


if __name__ == "__main__":
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    use_record(RECORDING in sys.argv)
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=lines, flush=True)
