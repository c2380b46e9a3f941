"""A process in which kernels are compiled for GPUs that are not here, as the tests' own interprets
them. One answers all questions: it takes longer to import Triton than to compile most kernels.

Run as a script it is that process: a line of JSON on the standard input has Python code and the
names it is given, and a line on the standard output says what the code left in `out`.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[2] / "tools"
LIMIT_S = 600
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


@contextmanager
def started() -> Iterator[Compiler]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__],
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
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=lines, flush=True)
