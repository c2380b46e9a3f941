"""Whatever a backend does not reject has to run and match the reference: any op, any shape, batches
of 1 to 5, any strides, any type.

The failure this looks for is that of llama.cpp PR 19884: a backend that takes an op at load, with a
batch of one, and cannot run it with a batch of four.
"""

from __future__ import annotations

import pytest
import torch
from op_cases import copies, draw, node_of
from random_graphs import Source, evaluate, transformer
from torch import Tensor

from mtmd.kernels.backends import Backend, Cpu, Limited, Reference
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.ops import OPS
from mtmd.kernels.ops.gather import as_numbers
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.flash_choice import AttentionForm, choose
from mtmd.kernels.plan.scheduler import make_plan

pytestmark = pytest.mark.usefixtures("poisoned")
# NMSE against the reference in fp32. In 16 bits: results and scores are rounded (2^-18 / 3 for
# bf16), weights of attention once more.
NMSE = {torch.float32: 1e-10, torch.bfloat16: 1e-4, torch.float16: 2e-6}
# Of quantized rows: a rounding before may make a code the next one
STORED = {"q8_0": 1e-4, "q4_0": 1e-2, "fp8": 1e-3, "bf16": 1e-5}
RULES = (
    "*:batch>1",
    "attention:head=24",
    "matmul:width=7",
    "gelu",
    "*:bf16",
    "attn_softmax:rows>2",
)
BACKENDS: dict[str, Backend] = {
    "cpu": Cpu(),
    "reference": Reference(),
    "limited cpu": Limited(Cpu(), RULES),
    "limited reference": Limited(Reference(), RULES),
}


def widened(inputs: list[Tensor | None]) -> list[Tensor | None]:
    return [t.float() if t is not None and t.is_floating_point() else t for t in inputs]


def check(backend: Backend, op: str, seed: int, dtype: torch.dtype, strided: bool) -> bool:
    """Whether the backend takes the case. Raises AssertionError where it takes it and gets it
    wrong.
    """
    inputs, attrs = draw(op, seed, dtype, strided)
    node = node_of(op, inputs, attrs)
    reason = backend.rejects(node)
    if reason is not None:
        assert reason.strip() and "\n" not in reason
        return False
    expected = OPS[op].reference(*copies(widened(inputs)), **attrs)
    expected = as_numbers(op, expected, inputs, attrs).double()
    assert backend.workspace(node) >= 0
    fits = OPS[op].in_place and node.type == node.inputs[0].type and node.type.is_contiguous
    for in_place in (False, True) if fits else (False,):
        actual = backend.lower(node, in_place)(*copies(inputs))
        assert Type.of(actual) == node.type, f"{node}: {Type.of(actual)} instead of {node.type}"
        actual = as_numbers(op, actual, inputs, attrs)
        hidden = expected == -torch.inf  # scores under a mask
        assert torch.equal(actual == -torch.inf, hidden)
        power = float(expected[~hidden].square().sum())
        error = float((actual.double() - expected)[~hidden].square().sum()) / (power or 1)
        quantized = any(name.endswith("quant") and kind for name, kind in attrs.items())
        # products of few rows with blocks take x as integers of 16 bits
        limit = max(NMSE[dtype], 1e-6) if quantized else NMSE[dtype]
        if op.endswith("_store"):
            kinds = (attrs.get("quant") or "").split("/")
            limit = max(limit, *(STORED.get(kind, 0) for kind in kinds))
        assert error <= limit, (
            f"{op} seed {seed}: NMSE {error:.1e} for "
            f"{[t if t is None else Type.of(t) for t in inputs]} {attrs}"
        )
    return True


@pytest.mark.parametrize("op", sorted(OPS))
@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_taken_runs_and_matches_the_reference(name, op):
    taken = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for seed in range(10):
            for strided in (False, True):
                taken += check(BACKENDS[name], op, seed, dtype, strided)
    # Cpu leaves fp16, the rules leave most: but a test in which nothing is taken would show
    # nothing.
    assert taken >= (40 if name == "cpu" else 60 if name == "reference" else 1) or op in RULES


def test_rules_and_types_are_refused():
    for op in sorted(OPS):
        assert not check(BACKENDS["cpu"], op, 1, torch.float16, False) or op in (
            "attn_softmax",
            "rms_norm",
            "rope_table",
        )
    assert not check(BACKENDS["limited cpu"], "gelu", 1, torch.float32, False)


class Forgetful(Limited):
    """Takes nodes by what it saw when it was loaded, one image, and fails with more: the failure of
    PR 19884.
    """

    def rejects(self, node: Node) -> str | None:
        return self.inner.rejects(node)

    def lower(self, node: Node, in_place: bool = False) -> Run:
        kernel = super().lower(node, in_place)

        def run(*inputs: Tensor | None) -> Tensor:
            if inputs[0] is not None and inputs[0].ndim >= 3 and inputs[0].shape[0] > 1:
                raise AssertionError(f"unsupported batch {inputs[0].shape[0]}")
            return kernel(*inputs)

        return run


@pytest.mark.parametrize("op", ["attention", "matmul", "layer_norm", "pool2d", "patch_embed"])
def test_the_fuzz_finds_a_backend_that_forgets_the_batch(op):
    with pytest.raises(AssertionError, match=r"unsupported batch [2-5]"):
        for seed in range(10):
            check(Forgetful(Cpu(), []), op, seed, torch.float32, False)


def graph(batch: int, form: AttentionForm | None = None) -> Node:
    return transformer(
        Source(), batch=batch, rows=9, width=24, heads=3, ffn=20, attention=form or AttentionForm()
    )


def test_a_batch_that_is_refused_at_run_time_falls_back_and_is_right():
    """Loaded with one image, run with four: the device takes all of the first and none of the
    second.
    """
    backends = [Limited(Cpu(), ["*:batch>1"]), Cpu(), Reference()]
    choice = choose(lambda form: [[graph(1, form)]], backends, (), "auto")
    assert choice.state == "on" and choice.refusals == ()
    one = make_plan([graph(1, choice.form)], backends)
    assert (
        {b.name for b in one.backend_of.values()} == {"limited"}
        and one.refusals == ()
        and one.copies == ()
    )
    for batch in (2, 3, 4, 5):
        plan = make_plan([graph(batch, choice.form)], backends)
        assert {b.name for b in plan.backend_of.values()} == {"cpu"}
        assert {r.reason for r in plan.refusals} == {f"batch {batch} is not supported"}
        assert {r.node.op for r in plan.refusals} == {
            "rms_norm",
            "matmul",
            "attention",
            "add",
            "gelu",
        }
        x = {"x": torch.randn(batch, 9, 24)}
        result = Executor(plan, Residency()).run(x)[0]
        torch.testing.assert_close(result, evaluate([graph(batch)], x)[0], rtol=1e-5, atol=1e-5)


def test_one_op_refused_at_a_batch_is_copied_out_and_back():
    backends = [Limited(Cpu(), ["attention:batch>1"]), Cpu(), Reference()]
    plan = make_plan([graph(4)], backends)
    per_layer = [
        ("attn_q.heads", "cpu"),
        ("attn_k.heads", "cpu"),
        ("attn_v.heads", "cpu"),
        ("attn.flat", "limited"),
    ]
    assert [(c.name, c.attrs["destination"]) for c in plan.copies] == [
        (f"blk.{i}.{part}@{to}", to) for i in (0, 1) for part, to in per_layer
    ]
    assert all(c.type.bytes == 4 * 9 * 24 * 4 for c in plan.copies)
    assert len(plan.splits) == 5
    x = {"x": torch.randn(4, 9, 24)}
    result = Executor(plan, Residency()).run(x)[0]
    torch.testing.assert_close(result, evaluate([graph(4)], x)[0], rtol=1e-5, atol=1e-5)
