"""The tests that can be run on a device, by `pytest --device`: families against transformers, the
demo model against its references. A row a file.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from gpu_kernels.package import ROOT
from gpu_kernels.processes import ended
from gpu_kernels.rows import Cells, Row, Setting, SkipError, Task, WrongError

RESULT = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
FAILED = re.compile(r"^(?:FAILED|ERROR) (.*)$", re.MULTILINE)
MIN_CORES, MAX_WORKERS = 4, 8


def tasks(setting: Setting) -> Iterator[Task]:
    if find_spec("pytest") is None:
        yield Task("all", _no_pytest)
    for file in files():
        name = str(file.relative_to(ROOT))
        yield Task(name, functools.partial(tested, name, setting))


def _no_pytest() -> Row:
    raise SkipError("pytest is not here")


def files() -> list[Path]:
    """The largest last."""
    if find_spec("pytest") is None:
        return []
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from requested_device import is_requesting  # type: ignore[import-not-found]

    result = filter(is_requesting, (ROOT / "tests").rglob("test_*.py"))
    return sorted(result, key=lambda file: (file.parent.name == "families", file.name))


def tested(name: str, setting: Setting) -> Row:
    """In a dry run tests are collected, and not run."""
    # Not from the repository's own folder, in which the package lies in parts.
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-v"]
        command += ["--rootdir", str(ROOT), "-p", "no:cacheprovider", "--tb=short", "-rfE"]
        command += ["--device", setting.device, str(ROOT / name)]
        command += ["--collect-only", "-q"] if setting.dry else workers()
        reported = Path(folder) / "output"
        with reported.open("w") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
                start_new_session=True,
            )
            code = ended(process, min(setting.left_s(), 1e6))
        text = reported.read_text()
    counts = Counter(RESULT.findall(text.partition("short test summary")[0]))
    if code != 0:
        failed = "; ".join(FAILED.findall(text)[:5]) or text[-600:]
        how = "it did not end in time" if code is None else f"exit code {code}"
        passed = f"{counts['PASSED']} passed"
        raise WrongError(f"{how}, {passed}, {counts['FAILED'] + counts['ERROR']} failed: {failed}")
    cells: Cells = {"file": name, "passed": counts["PASSED"], "skipped": counts["SKIPPED"]}
    return Row(cells, "Tests on the device")


def workers() -> list[str]:
    """Models and transformers' answers take a core each."""
    from mtmd.base.cores import usable_cores

    cores = usable_cores().usable
    if find_spec("xdist") is None or cores < MIN_CORES:
        return []
    return ["-n", str(min(MAX_WORKERS, cores // 2))]
