"""Pages of a mapped file that are released leave this process, and their values can be read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mtmd.kernels.resources.mapped_pages import release_pages


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssFile:")[2].split()[0]) << 10


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux is asked to")
def test_released_pages(tmp_path: Path) -> None:
    values = torch.arange(4 << 20)
    save_file({"x": values}, tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as file:
        mapped = file.get_tensor("x")
        assert torch.equal(mapped, values)
        before = resident()
        release_pages(mapped)
        assert before - resident() > 16 << 20
        assert torch.equal(mapped, values)
