"""Every Triton kernel of the table, by its `KERNEL`: its cases in Triton's interpreter against the
op's reference, the backend that looks it up, and its uses compiled for GPUs that are not here.

    pytest tests/kernels/gpu/test_table.py -k OP
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from op_cases import copies, draw
from op_cases import node_of as node_on

from mtmd.base.extras import install_command
from mtmd.kernels.backends import backends_for, gpu
from mtmd.kernels.backends.gpu import Gpu
from mtmd.kernels.backends.target import Target
from mtmd.kernels.backends.torch_device import LIMITS, TorchDevice
from mtmd.kernels.gpu import table
from mtmd.kernels.gpu.compile import SHARED_LIMIT
from mtmd.kernels.gpu.table import KERNELS, Entry
from mtmd.kernels.gpu.triton_kernel import node_of
from mtmd.kernels.graph import Type
from mtmd.kernels.kernel import types_of
from mtmd.kernels.ops import OPS

pytestmark = pytest.mark.usefixtures("exact_bf16", "poisoned")
ROOT = Path(__file__).parents[3]
ENTRIES = [
    pytest.param(op, entry, id=f"{op} {entry.module}")
    for op, entries in KERNELS.items()
    for entry in entries
]
CASES = [
    pytest.param(op, entry, case, id=f"{op} {case}")
    for op, entries in KERNELS.items()
    for entry in entries
    for case in entry.load().cases
]


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")


@pytest.mark.parametrize(("op", "entry"), ENTRIES)
def test_the_types_of_a_case_are_those_of_its_numbers(op, entry):
    for case in entry.load().cases:
        drawn = tuple(t if t is None else Type.of(t) for t in case.inputs())
        assert types_of(node_of(op, case)) == drawn, case


@pytest.mark.parametrize(("op", "entry", "case"), CASES)
def test_a_case_is_taken_and_right(op, entry, case, requested_device):
    kernel = entry.load()
    if requested_device.has_kernels:
        assert entry.applies(node_of(op, case))
        assert kernel.failure(op, case, requested_device.name) is None
    else:
        right_by_torch(backends_for(requested_device.name)[0], kernel, op, case)


def right_by_torch(device, kernel, op, case):
    """On a device without kernels, which may lack an operator: then the node runs on the CPU."""
    if reason := device.rejects(node_of(op, case)):
        pytest.skip(f"not taken: {reason}")
    run, limit = device.lower(node_of(op, case)), max(LIMITS[case.dtype], kernel.limits[case.dtype])
    by_torch = replace(
        kernel,
        run=lambda *i, **_: run(*i),
        rejects=lambda *_, **__: None,
        limits={case.dtype: limit},
    )
    assert by_torch.failure(op, case, device.device) is None


@pytest.mark.parametrize("op", KERNELS)
def test_a_case_where_each_op_is_torchs(op):
    kernel = KERNELS[op][0].load()
    device = TorchDevice("mps", torch.device("cpu"))
    right_by_torch(device, kernel, op, kernel.cases[0])
    wrong = TorchDevice("mps", torch.device("cpu"))
    wrong.lower = lambda node: lambda *i: device.lower(node)(*i) * 1.05
    with pytest.raises(AssertionError, match="expected at most"):
        right_by_torch(wrong, kernel, op, kernel.cases[0])


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(("op", "entry"), ENTRIES)
def test_whatever_is_let_through_is_right(op, entry, strided, requested_device):
    """On the random problems of the op, most of which no case has."""
    if not requested_device.has_kernels:
        pytest.skip(f"no kernels on {requested_device.name}")
    kernel, taken = entry.load(), 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed in range(4):
            inputs, attrs = draw(op, seed, dtype, strided)
            node = node_on(op, inputs, attrs)
            if not entry.applies(node) or kernel.rejects(*types_of(node), **node.attrs):
                continue
            taken += 1
            inputs = copies(inputs, requested_device.name)
            result = kernel.run(*copies(inputs), **attrs)
            assert Type.of(result) == node.type
            error = kernel.error(op, result, inputs, attrs)
            assert error <= kernel.limits[dtype], f"seed {seed} {dtype}: error {error:.1e}"
    assert taken or strided


@pytest.mark.parametrize(("op", "entry"), ENTRIES)
def test_a_wrong_result_is_noticed(op, entry):
    kernel = entry.load()
    case = kernel.cases[0]
    inputs = case.inputs()
    right = OPS[op].reference(*inputs, **case.options)
    for wrong in (right * 1.05, torch.full_like(right, torch.nan)):
        assert not kernel.error(op, wrong, inputs, case.options) <= kernel.limits[case.dtype]


@pytest.mark.usefixtures("ampere")
@pytest.mark.parametrize(("op", "entry"), ENTRIES)
def test_the_backend_runs_it_and_says_what_it_lacks(op, entry, monkeypatch):
    kernel = entry.load()
    case = kernel.cases[0]
    node = node_of(op, case)
    assert Gpu().rejects(node) is None and Gpu().lower(node).func is kernel.run
    bytes_beyond = kernel.workspace(*types_of(node), **node.attrs)
    assert Gpu().workspace(node) == Target("cuda:90").workspace(node) == bytes_beyond
    lacking = (
        lambda: monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5)),
        lambda: monkeypatch.setattr(gpu, "find_spec", lambda _: None),
    )
    for lack, words in zip(lacking, ("found 7.5", install_command("gpu")), strict=True):
        lack()
        reason = Gpu().rejects(node)
        if entry.optional:  # torch's own kernels run it
            torchs = Gpu().lower(node)
            assert reason is None and getattr(torchs, "func", torchs) is OPS[op].reference
        else:
            assert reason and f"the {entry.name} kernel needs" in reason and words in reason


class Never:
    """A kernel that takes nothing."""

    @staticmethod
    def rejects(*types: Type | None, **attrs: object) -> str:  # noqa: ARG004
        return "never"


def test_the_first_kernel_that_takes_a_node_runs_it(monkeypatch):
    """And of those that take none, an optional one leaves the node to torch."""
    node = node_of("short_conv", KERNELS["short_conv"][0].load().cases[0])
    entries = {optional: Entry("never", "", optional=optional) for optional in (False, True)}
    load = Entry.load
    monkeypatch.setattr(Entry, "load", lambda self: load(self) if self.module else Never)
    for first in entries.values():
        monkeypatch.setitem(table.KERNELS, "short_conv", (first, *KERNELS["short_conv"][-1:]))
        assert table.choose(node, lambda _: None).name == "short convolution"
    monkeypatch.setitem(table.KERNELS, "short_conv", (entries[True],))
    assert table.choose(node, lambda _: None) == table.Choice()
    monkeypatch.setitem(table.KERNELS, "short_conv", (entries[True], entries[False]))
    assert table.choose(node, lambda _: None).reason == "never"


def test_triton_is_not_imported_before_a_node_asks_for_it():
    code = (
        "import sys, mtmd.kernels.backends.gpu, mtmd.kernels.backends.target, "
        "mtmd.kernels.report.compiled; sys.exit('triton' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


SCRIPT = """
from dataclasses import asdict
from mtmd.kernels.gpu.compile import SHARED_LIMIT, compile_program
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import node_of
from mtmd.kernels.kernel import types_of
out = {}
for kernel in (entry.load() for entry in KERNELS[op]):
    for title, case in kernel.uses.items():
        node = node_of(op, case)
        program = kernel.main(*types_of(node), **node.attrs)
        out[title] = [asdict(compile_program(target, program)) for target in SHARED_LIMIT]
"""


# The products' many block types are compiled in test_gpu_quant_matmul.py, at fewer sizes.
@pytest.fixture(scope="module", params=[op for op in KERNELS if op != "matmul"])
def compiled(request, compiler):
    return request.param, compiler(SCRIPT, op=request.param)


def test_every_use_compiles_fits_and_spills_nothing(compiled):
    op, uses = compiled
    assert uses, f"{op}: no USES"
    for title, rows in uses.items():
        for used in rows:
            assert used["shared_bytes"] <= SHARED_LIMIT[used["target"]], title
            assert used["spill_bytes"] == 0, f"{title}: {used}"


SECOND = """
from dataclasses import asdict
from mtmd.kernels.gpu.compile import SHARED_LIMIT, compile_program
from mtmd.kernels.gpu.moe import kernel as moe
from mtmd.kernels.gpu.paged_attention import kernel as paged
from mtmd.kernels.gpu.triton_kernel import node_of
from mtmd.kernels.kernel import types_of
out = {}
for op, module in (("moe", moe), ("paged_attention", paged)):
    for title, case in module.KERNEL.uses.items():
        node = node_of(op, case)
        programs = module.KERNEL.launched(*types_of(node), **node.attrs)
        program = [p for p in programs if p.tile][-1]
        out[title] = [asdict(compile_program(target, program)) for target in SHARED_LIMIT]
"""


def test_second_programs_of_a_run_compile_and_spill_nothing(compiler):
    """What follows the first launch: products with down, and the sum of parts."""
    for title, rows in compiler(SECOND).items():
        for used in rows:
            assert used["shared_bytes"] <= SHARED_LIMIT[used["target"]], title
            assert used["spill_bytes"] == 0, f"{title}: {used}"


def test_the_documented_table_is_current(compiled):
    op, uses = compiled
    if op == "attention":
        return  # has sections of its own, see test_gpu_compile.py
    lines = (ROOT / "docs" / "kernels.md").read_text().splitlines()
    for title, rows in uses.items():
        cells = [
            f"{r['shared_bytes'] / 1024:.0f} / {r['registers']} / {r['spill_bytes']} / "
            f"{r['at_once']} / {r['instruction']}"
            for r in rows
        ]
        line = next((x for x in lines if x.startswith(f"| {title} |")), "")
        assert line.split(" | ")[2:] == [*cells[:-1], cells[-1] + " |"], (
            f"docs/kernels.md, {title}: run python tools/kernel_table.py > docs/kernels.md"
        )
