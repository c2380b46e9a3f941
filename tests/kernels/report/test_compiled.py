"""Which programs a prediction lists, of nodes that launch several."""

from __future__ import annotations

import pytest
import torch

from mtmd.kernels import ops
from mtmd.kernels.backends.target import Target
from mtmd.kernels.gpu import compile as compile_module
from mtmd.kernels.gpu.compile import Resources
from mtmd.kernels.gpu.table import KERNELS
from mtmd.kernels.gpu.triton_kernel import Program, node_of
from mtmd.kernels.graph import Node, graph_input
from mtmd.kernels.kernel import types_of
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.kernels.report.compiled import compiled_kernels

BF16, INT = torch.bfloat16, torch.int64


def value(name: str, *shape: int, dtype: torch.dtype = BF16) -> Node:
    return graph_input(name, shape, dtype, lambda batch: batch)


def experts(tokens: int, layer: int = 0) -> Node:
    """Eight of 128, as Qwen3-30B-A3B has them."""
    shapes = (tokens, 2048), (tokens, 128), (128, 768, 2048), (128, 768, 2048), (128, 2048, 768)
    given = [value(f"x{i}", *shape) for i, shape in enumerate(shapes)]
    return ops.moe(*given, routing=Routing(8, normalize=True), name=f"blk.{layer}.experts")


def attention(keys: int) -> Node:
    """A token's, to the pages of one sequence."""
    return ops.paged_attention(
        value("q", 1, 1, 8, 128),
        value("cache", 2, 1024, 4, 128),
        value("pages", keys // 32, dtype=INT),
        value("bounds", 1, 2, dtype=torch.int32),
        value("starts", 2, dtype=INT),
        size=32,
        scale=0.1,
        name="blk.0.attn",
    )


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of functions that are compiled, which nothing is."""
    names: list[str] = []

    def compile_program(target: str, program: Program) -> Resources:
        names.append(getattr(program.function, "fn", program.function).__name__)
        return Resources(target, 1024, 64, 0, "wgmma", 8)

    monkeypatch.setattr(compile_module, "compile_program", compile_program)
    return names


@pytest.mark.parametrize("tokens", [1, 2048])
def test_experts_are_all_their_programs(tokens: int, compiled: list[str]) -> None:
    target = Target("cuda:90")
    plan = make_plan([experts(tokens), experts(tokens, 1)], [target])
    result = [(k.kernel, k.nodes) for k in compiled_kernels("decoder, decode", plan, target)]
    order = [("experts, order", 2)] if tokens > 1 else []
    assert result == [
        ("experts, choice", 2),
        *order,
        ("experts, gate and up", 2),
        ("experts, down", 2),
        ("experts, sum", 2),
    ]
    assert len(compiled) == len(set(compiled)) == len(result)
    assert any("gated" in name for name in compiled) and any("down" in name for name in compiled)


def test_shared_out_keys_are_two_programs(compiled: list[str]) -> None:
    target = Target("cuda:90")
    plan = make_plan([attention(512)], [target])
    result = [(k.kernel, k.head) for k in compiled_kernels("decoder, decode", plan, target)]
    assert result == [("paged attention", 128), ("attention parts", 128)]
    assert compiled == ["paged_attention_kernel", "reduce_kernel"]


def test_each_of_several_programs_has_a_name() -> None:
    """That fits into the table's column."""
    for op, entries in KERNELS.items():
        for entry in entries:
            kernel = entry.load()
            for case in (*kernel.cases, *kernel.uses.values()):
                node = node_of(op, case)
                programs = kernel.launched(*types_of(node), **node.attrs)
                names = [
                    (p.title or entry.name) + (f", head {p.head}" if p.head else "")
                    for p in programs
                ]
                assert len(set(names)) == len(names) and max(map(len, names), default=0) <= 27
