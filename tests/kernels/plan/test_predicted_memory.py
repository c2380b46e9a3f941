"""The memory a plan is predicted to take, by hand on small graphs and against what the allocator
hands out on larger ones.
"""

from __future__ import annotations

import pytest
import torch
from op_cases import node_of
from random_graphs import Source, device, given, transformer

from mtmd.kernels import ops
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.reference import _Allocations, reference_workspace
from mtmd.kernels.cpu import matmul
from mtmd.kernels.graph import Node
from mtmd.kernels.ops import OPS
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.flash_choice import AttentionForm
from mtmd.kernels.plan.scheduler import make_plan

pytestmark = pytest.mark.usefixtures("poisoned")


def gelu(x: Node, name: str) -> Node:
    return ops.gelu(x, approximate="none", name=name)


def test_predicted_peak_by_hand():
    x = given("x", 4, 8)  # 128 bytes
    two = gelu(ops.softcap(x, cap=1.0, name="a"), "b")
    assert make_plan([two], [Reference()]).compute_bytes == {"cpu": 128 + 128}
    assert make_plan([two], [Reference()], overwrite=False).compute_bytes == {"cpu": 3 * 128}
    three = gelu(gelu(gelu(x, "a"), "b"), "c")
    assert make_plan([three], [Reference()], overwrite=False).compute_bytes == {"cpu": 3 * 128}, (
        "a is freed before c is made"
    )
    split = make_plan([three], [device("gpu", "*:/b/"), Cpu()], overwrite=False)
    # gpu: x, a, then the copy of b and c; cpu: the copy of a, and b.
    assert split.compute_bytes == {"gpu": 3 * 128, "cpu": 2 * 128}


def test_state_is_not_counted_as_compute():
    cache = given("cache", 2, 400, 1, 6, state=True)
    kv = ops.kv_store(
        cache,
        given("k", 2, 1, 6),
        given("v", 2, 1, 6),
        given("at", 2, dtype=torch.int64),
        name="kv",
    )
    plan = make_plan([ops.kv_half(kv, which=0, name="keys")], [Reference()])
    assert plan.compute_bytes == {"cpu": 2 * 48 + 16}


SHAPE = {"batch": 1, "rows": 1024, "width": 288, "heads": 4, "ffn": 700}
GRAPHS = {
    "flash": lambda: transformer(Source(), **SHAPE),
    "explicit": lambda: transformer(Source(), attention=AttentionForm(all_explicit=True), **SHAPE),
    "mixed": lambda: transformer(
        Source(), attention=AttentionForm(frozenset({"blk.1.attn"})), **SHAPE
    ),
    "wide ffn": lambda: transformer(Source(), batch=2, rows=512, width=128, heads=2, ffn=4096),
    "causal explicit": lambda: transformer(
        Source(),
        attention=lambda *a, **o: AttentionForm(all_explicit=True)(*a, causal=True, **o),
        **{**SHAPE, "heads": 1},
    ),
    "causal flash": lambda: transformer(
        Source(), attention=lambda *a, **o: ops.attention(*a, causal=True, **o), **SHAPE
    ),
    "soft cap": lambda: transformer(
        Source(), attention=lambda *a, **o: ops.attention(*a, softcap=5.0, **o), **SHAPE
    ),
    "bf16": lambda: transformer(Source(), dtype=torch.bfloat16, **{**SHAPE, "rows": 640}, layers=1),
}


@pytest.fixture
def no_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """MKL packs fp32 operands in memory of its own, which torch's allocator does not see:
    benchmarks/memory.py measures the process.
    """
    counted = matmul.packed_bytes
    monkeypatch.setattr(
        matmul, "packed_bytes", lambda x, w: 0 if w.dtype == torch.float32 else counted(x, w)
    )


@pytest.mark.usefixtures("no_packing")
@pytest.mark.parametrize("backend", [Cpu(), Reference()], ids=lambda b: b.name)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_predicted_peak_is_the_measured_one(name, backend, peak_bytes):
    output = GRAPHS[name]()
    plan = make_plan([output], [backend])
    executor, batch = Executor(plan, Residency()), {"x": torch.randn(output.shape).to(output.dtype)}
    measured = peak_bytes(lambda: executor.run(batch))
    assert abs(plan.compute_bytes["cpu"] / measured - 1) < 0.1, (
        f"predicted {plan.compute_bytes['cpu']}, measured {measured}"
    )


@pytest.mark.usefixtures("no_packing")
def test_predicted_peaks_of_two_memories_add_up_to_the_measured_one(peak_bytes):
    output = GRAPHS["flash"]()
    plan = make_plan([output], [device("gpu", "gelu", "rms_norm"), Cpu()])
    executor, batch = Executor(plan, Residency()), {"x": torch.randn(output.shape)}
    measured = peak_bytes(lambda: executor.run(batch))
    assert max(plan.compute_bytes.values()) < measured <= 1.02 * sum(plan.compute_bytes.values())


def test_allocations_are_counted_while_they_live():
    x = torch.empty(100, device="meta")
    with torch.no_grad(), _Allocations() as seen:
        y = x + 1  # 400
        view = y[10:].view(3, 30)
        assert (seen.live, seen.peak) == (400, 400)
        del y
        assert seen.live == 400, "a view keeps the memory"
        z = view * 2  # 360
        z.add_(1)
        assert (seen.live, seen.peak) == (760, 760)
        del view
        assert (seen.live, seen.peak) == (360, 760)
        half = x[:50]
        assert seen.live == 360, "a view of what was there before takes nothing"
        del half, z
    assert (seen.live, seen.peak) == (0, 760)


LARGE = {
    "matmul": [(600, 300), (500, 300), (500,)],
    "rms_norm": [(3, 200, 300), (300,)],
    "layer_norm": [(600, 300), (300,), (300,)],
    "gelu": [(600, 300)],
    "gelu_mul": [(600, 300), (600, 300)],
    "softcap": [(600, 300)],
    "add": [(600, 300), (300,)],
    "pool2d": [(2, 400, 300)],
    "patch_embed": [(2, 3, 140, 140), (300, 3, 14, 14), (300,)],
    "conv2d": [(2, 400, 60), (60, 30, 3, 3), (60,)],
    "attention": [(2, 300, 4, 32)] * 3,
    "attn_scores": [(2, 300, 4, 32), (2, 300, 2, 32)],
    "attn_softmax": [(2, 4, 300, 300)],
    "attn_mix": [(2, 4, 300, 300), (2, 300, 2, 32)],
    "add_mixed": [(200, 4, 300), (200, 4, 300), (200, 4, 4)],
    "match_magnitude": [(200, 3, 300), (200, 1, 300)],
    "gaussian_topk": [(600, 300)],
    "cumulative_norm": [(2, 300, 600), (60,)],
}
ATTRS = {
    "rms_norm": {"eps": 1e-6},
    "layer_norm": {"eps": 1e-6},
    "gelu": {"approximate": "tanh"},
    "gelu_mul": {"approximate": "tanh"},
    "softcap": {"cap": 2.0},
    "pool2d": {"grid": (20, 20), "size": (10, 10)},
    "conv2d": {"grid": (20, 20), "padding": (1, 1, 1, 1), "groups": 2},
    "attention": {"scale": 0.1, "causal": True},
    "attn_scores": {"scale": 0.1, "softcap": 3.0},
    "attn_softmax": {"causal": True, "window": 50},
    "match_magnitude": {"floor": 1e-5},
    "gaussian_topk": {"deviations": 1.6},
    "cumulative_norm": {"eps": 1e-3},
}


@pytest.mark.parametrize("op", LARGE)
def test_the_workspace_of_a_reference_is_the_measured_one(op, peak_bytes):
    # In bf16 oneDNN packs the operands of a product, or not, by the machine.
    for dtype in (
        (torch.float32,)
        if op in ("matmul", "patch_embed", "conv2d")
        else (torch.float32, torch.bfloat16)
    ):
        inputs = [
            torch.randn(shape).to(torch.float32 if op == "attn_softmax" else dtype)
            for shape in LARGE[op]
        ]
        node = node_of(op, inputs, ATTRS.get(op, {}))
        predicted = node.type.bytes + reference_workspace(node)
        measured = peak_bytes(
            lambda op=op, inputs=inputs: OPS[op].reference(*inputs, **ATTRS.get(op, {}))
        )
        assert abs(predicted / measured - 1) < 0.1, (
            f"{dtype}: predicted {predicted}, measured {measured}"
        )
