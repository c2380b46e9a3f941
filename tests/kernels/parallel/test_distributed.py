"""A group of ranks, of which this process is the only one: how it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtmd.base.errors import DeviceError
from mtmd.kernels.parallel import distributed
from mtmd.kernels.parallel.distributed import DistributedGroup, check_unused
from mtmd.ranks.meeting import new_store


def threads() -> dict[str, str]:
    """Of this process, by number: their names."""
    return {
        task.name: (task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()
    }


def test_no_thread_of_gloo_outlives_a_group_that_is_left() -> None:
    """One that lets go of a tensor while the interpreter is torn down aborts the process."""
    before = threads()
    group = DistributedGroup(new_store(1), 0, 1, "gloo")
    x = torch.arange(3.0)
    assert group.sum(x) is x and group.gather(x, 0, (3,)).tolist() == [0, 1, 2]
    started = {n: name for n, name in threads().items() if n not in before}
    assert any("gloo" in name for name in started.values())
    group.leave()
    assert not [n for n in threads() if "gloo" in started.get(n, "")]
    with pytest.raises(DeviceError, match="has left the others"):
        group.sum(x)
    group.leave()


def test_a_process_that_has_not_met_the_others_meets_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch would have it wait for a group that the others do not know by this name."""

    def lost(*_: object, **__: object) -> None:
        raise RuntimeError("Timed out after 1 s waiting for clients")

    monkeypatch.setattr(distributed, "_process", distributed._Process())
    monkeypatch.setattr(torch.distributed, "init_process_group", lost)
    check_unused()
    with pytest.raises(DeviceError, match="did not meet"):
        DistributedGroup(None, 0, 2, "gloo")
    with pytest.raises(DeviceError, match="lost while they met: start another process"):
        check_unused()


def test_an_error_does_not_hold_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    before = threads()
    group = DistributedGroup(new_store(1), 0, 1, "gloo")

    def lost(x: torch.Tensor, group: object) -> None:
        assert x is not None and group is not None
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(torch.distributed, "all_reduce", lost)
    with pytest.raises(DeviceError, match="lost the others") as result:
        group.sum(torch.zeros(1))
    group.leave()
    assert result.value.__cause__ is not None
    assert not [n for n, name in threads().items() if n not in before and "gloo" in name]
