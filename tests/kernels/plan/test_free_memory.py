"""Free memory: as the system, its control groups and the driver tell; and the first guess at what a
plan takes, which is never too low.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from op_cases import MAKERS, draw, node_of
from random_graphs import Source, transformer

from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.reference import ROUGH, plain_bytes
from mtmd.kernels.graph import Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan import free_memory
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.kernels.plan.scheduler import make_plan

GB = 10**9
MEMINFO = (
    "MemTotal:  16000000 kB\nMemFree:  100 kB\nMemAvailable:   4000000 kB\nSwapFree: 9000000 kB\n"
)
V2 = {
    "memory.max": "3000000000\n",
    "memory.current": "2500000000\n",
    "memory.stat": "anon 2000000000\ninactive_file 300000000\nactive_file 100000000\n",
}
V1 = {
    "memory.limit_in_bytes": "3000000000\n",
    "memory.usage_in_bytes": "2500000000\n",
    "memory.stat": "cache 5\ninactive_file 1\ntotal_inactive_file 200000000\ntotal_active_file "
    "50000000\n",
}


def system(
    folder: Path, groups: str, files: dict[str, dict[str, str]], meminfo: str = MEMINFO
) -> int | None:
    """Free bytes of a made-up system: `groups` is its /proc/self/cgroup, `files` those of its
    control groups by their folder.
    """
    proc, cgroup = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    if meminfo:
        (proc / "meminfo").write_text(meminfo)
    (proc / "self" / "cgroup").write_text(groups)
    for name, texts in files.items():
        (cgroup / name).mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (cgroup / name / file).write_text(text)
    return free_memory.system_bytes(proc, cgroup)


SYSTEMS: dict[str, tuple[str, dict[str, dict[str, str]], int]] = {
    "no groups": ("", {}, 4_096_000_000),
    "version 2": ("0::/a/b\n", {"a/b": V2}, 900_000_000),
    "version 2, no limit": ("0::/a\n", {"a": V2 | {"memory.max": "max\n"}}, 4_096_000_000),
    "a limit further up": (
        "0::/a/b\n",
        {"a/b": V2 | {"memory.max": "max\n"}, "a": V2},
        900_000_000,
    ),
    "the tighter of two": (
        "0::/a/b\n",
        {"a/b": V2, "a": V2 | {"memory.max": "2600000000\n"}},
        500_000_000,
    ),
    "inside a container": ("0::/not/to/be/seen\n", {".": V2}, 900_000_000),
    "more than there is": ("0::/\n", {".": V2 | {"memory.max": "9000000000\n"}}, 4_096_000_000),
    "used up": ("0::/\n", {".": V2 | {"memory.current": "9000000000\n"}}, 0),
    "version 1": ("7:cpu:/x\n4:memory:/a\n0::/\n", {"memory/a": V1}, 750_000_000),
    "version 1, no limit": (
        "4:memory:/a\n",
        {"memory/a": V1 | {"memory.limit_in_bytes": "9223372036854771712\n"}},
        4_096_000_000,
    ),
    "version 1, other controllers": ("4:cpu,cpuacct:/a\n", {"memory/a": V1}, 4_096_000_000),
    "broken files": (
        "4:memory:/a\n0::/b\nnonsense\n",
        {"memory/a": V1 | {"memory.usage_in_bytes": ""}, "b": V2 | {"memory.max": "x"}},
        4_096_000_000,
    ),
}


@pytest.mark.parametrize("case", SYSTEMS)
def test_what_the_system_and_its_groups_leave(case: str, tmp_path: Path) -> None:
    groups, files, expected = SYSTEMS[case]
    assert system(tmp_path, groups, files) == expected


def test_nobody_tells(tmp_path: Path) -> None:
    assert system(tmp_path / "a", "0::/\n", {".": V2}, meminfo="") is None
    assert system(tmp_path / "b", "", {}, meminfo="MemTotal: 5 kB\n") is None
    assert free_memory.free_bytes(SimpleNamespace(device=torch.device("meta"))) is None  # type: ignore[arg-type]


def test_this_machine() -> None:
    result = free_memory.free_bytes(Cpu())
    assert result is not None and 1 << 20 < result < 1 << 50


def test_an_answer_is_kept_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, requested = [100.0], []
    monkeypatch.setattr(free_memory, "_known", {})
    monkeypatch.setattr(free_memory.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        free_memory, "_measure", lambda device: requested.append(device) or len(requested)
    )
    assert [free_memory.free_bytes(Cpu()), free_memory.free_bytes(Reference())] == [1, 1]
    clock[0] += free_memory.CACHED_S * 1.1
    assert free_memory.free_bytes(Cpu()) == 2 and requested == [torch.device("cpu")] * 2


def test_a_gpu_has_what_torch_keeps_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_known", {})
    for name, value in {
        "mem_get_info": (5 * GB, 80 * GB),
        "memory_reserved": 3 * GB,
        "memory_allocated": GB,
    }.items():
        monkeypatch.setattr(
            torch.cuda,
            name,
            lambda device, value=value: value if device == torch.device("cuda:1") else None,
        )
    assert free_memory.free_bytes(SimpleNamespace(device=torch.device("cuda:1"))) == 7 * GB  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", [Cpu(), Reference()], ids=lambda b: b.name)
@pytest.mark.parametrize("op", MAKERS)
def test_no_op_takes_as_much_on_the_way_as_the_first_guess(op: str, backend: Any) -> None:
    for seed in range(12):
        node = node_of(op, *draw(op, seed, (torch.float32, torch.bfloat16)[seed % 2])[:2])
        counts_itself = (
            OPS[op].workspace is not None
            or op == "attention"
            # The others are made for devices alone whose own kernels run them, with nothing beside.
            or (op in ("matmul", "matmul_gated", "matmul_gelu") and "quant" in node.attrs)
        )
        assert counts_itself or backend.workspace(node) <= ROUGH / 2 * plain_bytes(node)


@pytest.mark.parametrize(
    "form", [AttentionForm(), AttentionForm(all_explicit=True)], ids=["flash", "explicit"]
)
def test_the_first_guess_is_no_less_than_the_prediction(
    form: AttentionForm, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(
        [transformer(Source(), batch=2, rows=300, width=96, heads=2, ffn=200, attention=form)],
        [Cpu()],
    )
    with monkeypatch.context() as without:
        without.setattr(Type, "meta", lambda _: 1 / 0)
        rough = plan.rough_bytes["cpu"]
    assert plan.compute_bytes["cpu"] <= rough <= 20 * plan.compute_bytes["cpu"]
