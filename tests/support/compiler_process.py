"""A process in which kernels are compiled for GPUs that are not here, as the tests' own interprets
them. One answers all questions: it takes longer to import Triton than to compile most kernels.

Run as a script it is that process: a line of JSON on the standard input has Python code and the
names it is given, and a line on the standard output says what the code left in `out`.

To compile all of them takes minutes, and equal sources, options and compilers give equal programs:
what they take is noted in kernels_compiled.json, by all three. What is not noted is compiled, and
so is one use of each kernel, to be compared with what is noted (`compile_anew`). After a change of
a kernel, or of Triton, this notes all anew:

    NOTE=1 python -m pytest -q tests/kernels/gpu -k "compile or current or fits or instructions"
"""

from __future__ import annotations

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
from dataclasses import asdict
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parents[2] / "tools"
NOTED = Path(__file__).parent / "kernels_compiled.json"
LIMIT_S = 600


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


def key(target: str, program: Any) -> str:
    """Of what a compiler is given, and of the compiler; without the places of its libraries, which
    come with it.
    """
    import triton

    from mtmd.kernels.gpu.compile import specialised

    source, options = specialised(target, program)
    chosen = sorted((k, str(v)) for k, v in vars(options).items() if k != "extern_libs")
    given = triton.__version__, target, source.hash(), chosen
    return hashlib.sha256(repr(given).encode()).hexdigest()[:32]


def with_notes(compile_anew: Callable[..., Any], notes: dict[str, Any]) -> Callable[..., Any]:
    """`compile_program`, which asks the compiler for what is not noted, and notes it."""
    from mtmd.kernels.gpu.compile import Resources

    def compile_program(target: str, program: Any) -> Any:
        name = key(target, program)
        if name not in notes:
            notes[name] = asdict(compile_anew(target, program))
        return Resources(**notes[name])

    return compile_program


def answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    names = {"__name__": "compiled", **asked["given"]}
    try:
        exec(asked["code"], names)
        return {"out": names["out"]}
    except BaseException:
        return {"error": traceback.format_exc()}


def main() -> None:
    from mtmd.kernels.gpu import compile as module

    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no answer
    anew = "NOTE" in os.environ
    notes: dict[str, Any] = {} if anew else json.loads(NOTED.read_text())
    module.compile_anew = module.compile_program  # type: ignore[attr-defined]
    module.compile_program = with_notes(module.compile_program, notes)
    for line in sys.stdin:
        print(json.dumps(answer(line)), file=lines, flush=True)
    if anew:
        rows = (f"{json.dumps(name)}: {json.dumps(notes[name])}" for name in sorted(notes))
        NOTED.write_text("{\n" + ",\n".join(rows) + "\n}\n")


if __name__ == "__main__":
    main()
