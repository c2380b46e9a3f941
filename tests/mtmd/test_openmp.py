"""What torch's threads are told before there is a torch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mtmd.openmp import SPINS, STATED


def spins(code: str, **environment: str) -> str:
    """What a new process has in its environment after `code`."""
    saved = {k: v for k, v in os.environ.items() if k not in STATED}
    done = subprocess.run(
        [sys.executable, "-c", f"import os, sys\n{code}\nprint(os.environ.get('GOMP_SPINCOUNT'))"],
        env={**saved, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("code", ["import mtmd", "from mtmd.options.load import LoadOptions"])
def test_it_is_said_with_the_first_import(code: str) -> None:
    assert spins(code) == SPINS


def test_what_somebody_has_said_stays() -> None:
    assert spins("import mtmd", GOMP_SPINCOUNT="7") == "7"
    assert spins("import mtmd", OMP_WAIT_POLICY="active") == "None"


def test_nothing_is_said_to_a_torch_that_is_there() -> None:
    assert spins("sys.modules['torch'] = sys\nimport mtmd") == "None"


def test_torch_hears_of_it() -> None:
    """Its OpenMP shows what it has read: in a process of its own (1.5 s to import torch)."""
    if not sys.platform.startswith("linux"):
        return  # GNU's OpenMP is Linux'
    done = subprocess.run(
        [sys.executable, "-c", "import mtmd, torch"],
        env={
            **{k: v for k, v in os.environ.items() if k not in STATED},
            "OMP_DISPLAY_ENV": "VERBOSE",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"GOMP_SPINCOUNT = '{SPINS}'" in done.stderr
