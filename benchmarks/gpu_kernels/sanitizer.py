"""NVIDIA's compute-sanitizer on a case of every kernel: reads and writes out of bounds, races in
shared memory, memory that is read before it is written, and barriers that are not met.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from gpu_kernels import ahead
from gpu_kernels.cases import first, kernels
from gpu_kernels.processes import ended, kill_all
from gpu_kernels.rows import Cells, Once, Row, Setting, SkipError, Task, WrongError

TOOL = "compute-sanitizer"
CHECKS = ("memcheck", "racecheck", "initcheck", "synccheck")
WHERE = re.compile(r"\bat (\S.*)")  # "attention_kernel+0x410 in kernel.py:120", or the like
SUMMARY = re.compile(r"=+\s+(?:ERROR|RACECHECK) SUMMARY: (\d+)")
SCRIPT = Path(__file__).parents[1] / "gpu.py"
ERROR_CODE = 9
REFUSED = "Device not supported"


class Check:
    """One of the tool's, in a process of its own. In a dry run without the tool: the cases alone.

    Raises SkipError where it is not here.
    """

    def __init__(self, name: str, folder: Path, setting: Setting):
        tool = shutil.which(TOOL)
        if tool is None and not setting.dry:
            raise SkipError(f"{TOOL} is not on the PATH")
        self.name, self._log, self._reported = name, folder / f"{name}.log", folder / name
        command = [sys.executable, str(SCRIPT), "--run-cases", "--device", setting.device]
        if tool is not None and not setting.dry:
            options = ["--tool", name, "--error-exitcode", str(ERROR_CODE)]
            command = [tool, *options, "--log-file", str(self._log), *command]
        with self._reported.open("w") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
                start_new_session=True,
            )

    def row(self, setting: Setting) -> Row:
        code = ended(self.process, min(setting.left_s(), 1e6))
        output = self._reported.read_text()
        log = self._log.read_text() if self._log.exists() else ""
        done = output.count(" done\n")
        if code is None:
            raise WrongError(f"it did not end in time, after {done} kernels")
        if REFUSED in log + output:
            raise SkipError(f"{TOOL} does not take this machine's device")
        if code not in (0, ERROR_CODE):
            last = (output.strip().splitlines() or [""])[-1]
            raise WrongError(f"exit code {code}: {last:.200}")
        elsewhere = judged(code, log, frozenset() if setting.dry else own_names())
        cells: Cells = {"check": self.name, "kernels": done, "errors elsewhere": elsewhere}
        return Row(cells, f"Clean by {TOOL}")


def tasks(setting: Setting) -> Iterator[Task]:
    """All at once: each takes long to start, and no times are taken."""
    with tempfile.TemporaryDirectory() as folder:
        begun = Once(lambda: {name: Check(name, Path(folder), setting) for name in CHECKS})
        try:
            for name in CHECKS:
                yield Task(name, functools.partial(lambda name: begun()[name].row(setting), name))
        finally:
            for check in begun.made or {}:
                kill_all(begun()[check].process)


def judged(code: int, log: str, own: frozenset[str]) -> int:
    """Errors in kernels that are not ours, which torch brings. Raises WrongError for ours, and for
    those whose place is not told.
    """
    if code != ERROR_CODE:
        return 0
    where = WHERE.findall(log)
    ours = sorted(own.intersection(re.findall(r"\w+", " ".join(where))))
    errors = sum(map(int, SUMMARY.findall(log)))
    if ours or not where:
        raise WrongError(
            f"{errors} errors, in {', '.join(ours) or 'an unknown place'}: {log[:600]}"
        )
    return errors


@functools.cache
def own_names() -> frozenset[str]:
    from mtmd.kernels.gpu.table import KERNELS

    return frozenset(
        program.function.__name__ for op in KERNELS for program in ahead.programs(op, ahead.ABSENT)
    )


def run_cases(device: str) -> int:
    """A small case of every kernel, in this process."""
    from mtmd.kernels.gpu.table import KERNELS

    wrong = 0
    for op in KERNELS:
        for kernel in kernels(op):
            failed = kernel.failure(op, first(kernel), device)
            print(op, failed or "done", flush=True)
            wrong += failed is not None
    return int(wrong > 0)
