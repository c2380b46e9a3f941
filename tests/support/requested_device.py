"""`pytest --device cuda`: the tests that can be run on a device, and no others, on that one.

A test takes the fixture `requested_device`; without the option it is the CPU, where Triton's kernels
run in its interpreter. On cuda and hip (torch's name of which is cuda) they are the card's, on mps
and xpu, which have none, each op is torch's. Other files are not read: a machine with a device may
lack what they import. Nor are warnings errors there: its versions may be others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

TAKES_IT = re.compile(r"def \w+\([^)]*\brequested_device\b")
NAMES = "cpu, cuda, cuda:N, hip, hip:N, mps, xpu or xpu:N"


@dataclass(frozen=True)
class RequestedDevice:
    """`name` as torch, and mtmd's `device`, have it."""

    name: str = "cpu"

    @property
    def has_kernels(self) -> bool:
        """Triton's: compiled, or in the interpreter."""
        return self.name.startswith(("cpu", "cuda"))


def add_option(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        help=f"run the tests that can be run on a device, on this one: {NAMES}; default: all, on "
        "the CPU",
    )


def configure(name: str | None) -> RequestedDevice:
    """Before anything is collected: kernels are made for the interpreter, or for a card, when their
    files are read. Raises UsageError for a device that is not here.
    """
    if name is None:
        return RequestedDevice()
    if not re.fullmatch(r"cpu|mps|(cuda|hip|xpu)(:[0-9]{1,4})?", name):
        raise pytest.UsageError(f"--device {name}: expected {NAMES}")
    if name == "cpu":
        return RequestedDevice()

    import torch

    from mtmd.base.errors import OptionError
    from mtmd.kernels.backends import backends_for

    result = name.replace("hip", "cuda")
    if name != result and torch.version.hip is None:
        raise pytest.UsageError(
            f"--device {name}: this torch ({torch.__version__}) is no ROCm build; install one from "
            "pytorch.org"
        )
    os.environ.pop("TRITON_INTERPRET", None)
    try:
        backends_for(result)
    except OptionError as error:
        raise pytest.UsageError(f"--{error}".replace("'", "").replace(" or auto", "")) from None
    if result.startswith("cuda"):
        torch.cuda.set_device(f"cuda:{result.partition(':')[2] or 0}")
    return RequestedDevice(result)


@lru_cache(maxsize=4096)
def is_requesting(path: Path) -> bool:
    """Whether a file of tests has one that can be run on a device, or a folder such a file."""
    if path.is_dir():
        return any(map(is_requesting, path.rglob("test_*.py")))
    return TAKES_IT.search(path.read_text()) is not None


def choose(items: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Tests that can be run on a device, and the others."""
    chosen: list[Any] = []
    others: list[Any] = []
    for item in items:
        (chosen if "requested_device" in getattr(item, "fixturenames", ()) else others).append(item)
    return chosen, others
