"""Mixtures of experts in a decoder: every layout in which files hold them, blocks of GGUF, the
shared expert, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.backends import Cpu
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter
from mtmd.kernels.checkpoint.open_weights import GgufFile
from mtmd.kernels.graph import Type, graph_input, toposort
from mtmd.kernels.layers import Weights
from mtmd.kernels.ops.moe import Routing
from mtmd.kernels.plan.executor import Executor, Residency
from mtmd.kernels.plan.scheduler import make_plan
from mtmd.llm.blocks import moe_ffn
from mtmd.llm.experts import Experts, expert_parameters

ONE = Experts(5, 14, Routing(2, normalize=True), frozenset((0,)))
SOURCES = ("model.language_model.layers.0.mlp.", "model.layers.0.mlp.")


class Stored:
    """A weight file in memory."""

    def __init__(self, tensors: dict[str, Tensor], canonical: bool = False):
        self.tensors, self.canonical = tensors, canonical

    def names(self) -> list[str]:
        return list(self.tensors)

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.tensors[name].shape), self.tensors[name].dtype

    def kind(self, name: str) -> str:  # noqa: ARG002
        return "F32"

    def read(self, name: str) -> Tensor:
        return self.tensors[name]


def layouts(gate: Tensor, up: Tensor, down: Tensor) -> dict[str, tuple[dict[str, Tensor], bool]]:
    """The experts of one layer as different checkpoints hold them, and whether it is a GGUF."""
    at, both = "model.language_model.layers.0.mlp.experts.", torch.cat((gate, up), 1)
    single = {
        f"model.layers.0.mlp.experts.{e}.{part}_proj.weight": table[e]
        for part, table in (("gate", gate), ("up", up), ("down", down))
        for e in range(len(gate))
    }
    own = {
        f"blk.0.ffn_{part}_exps.weight": table
        for part, table in (("gate", gate), ("up", up), ("down", down))
    }
    return {
        "published Qwen3-VL": (
            {f"{at}gate_up_proj": both.transpose(1, 2), f"{at}down_proj": down.transpose(1, 2)},
            False,
        ),
        "transformers 5": ({f"{at}gate_up_proj": both, f"{at}down_proj": down}, False),
        "one by one": (single, False),
        "GGUF": (own, True),
        "GGUF, gate and up in one": (
            {"blk.0.ffn_gate_up_exps.weight": both, "blk.0.ffn_down_exps.weight": down},
            True,
        ),
    }


def tables(experts: Experts, width: int, turned: bool = True) -> dict[str, Parameter]:
    return {
        name: p
        for name, p in expert_parameters("blk.0", SOURCES, experts, width, turned=turned).items()
        if "_exps" in name
    }


EXPERT_TABLES = [
    torch.randn(5, *shape, generator=torch.Generator().manual_seed(i))
    for i, shape in enumerate(((14, 40), (14, 40), (40, 14)))
]


@pytest.mark.parametrize("layout", layouts(*EXPERT_TABLES))
def test_every_layout_gives_the_same_experts(layout: str) -> None:
    tensors, canonical = layouts(*EXPERT_TABLES)[layout]
    requested = tables(ONE, 40)
    weights = CanonicalWeights(Stored(tensors, canonical), requested, "folder")
    assert weights.sources == set(tensors) and len(requested) == 3
    for part, expected in zip(("gate", "up", "down"), EXPERT_TABLES, strict=True):
        assert torch.equal(
            weights.read(f"blk.0.ffn_{part}_exps.weight", torch.float32), expected
        ), part


def test_experts_that_could_be_held_either_way_are_refused() -> None:
    """Width 28 is twice the experts' FFN: a table of gates and ups looks the same turned round, and
    loading it would be a guess.
    """
    at = "model.language_model.layers.0.mlp.experts."
    tensors = {
        f"{at}gate_up_proj": torch.zeros(5, 28, 28),
        f"{at}down_proj": torch.zeros(5, 28, 14),
    }
    with pytest.raises(
        ModelError, match=r"gate_up_proj of shape \[5, 28, 28\] can be read in two ways"
    ):
        CanonicalWeights(Stored(tensors), tables(ONE, 28), "folder")
    CanonicalWeights(
        Stored(tensors), tables(ONE, 28, turned=False), "folder"
    )  # for models that are never turned round


def test_misshapen_experts_are_named_with_both_shapes() -> None:
    at = "model.language_model.layers.0.mlp.experts."
    tensors = {
        f"{at}gate_up_proj": torch.zeros(5, 27, 40),
        f"{at}down_proj": torch.zeros(5, 40, 14),
    }
    with pytest.raises(
        ModelError,
        match=r"gate_up_proj has shape \[5, 27, 40\], expected \[5, 28, 40\] from the configuration",
    ):
        CanonicalWeights(Stored(tensors), tables(ONE, 40), "folder")


def run(x: Tensor, weights: CanonicalWeights, experts: Experts) -> tuple[Tensor, list[str]]:
    """What the layer gives for x, and the types of the weights its plan holds."""
    graph = moe_ffn(
        graph_input("x", x.shape, x.dtype, lambda b: b), "blk.0", Weights(weights, x.dtype), experts
    )
    stored = [str(n.type) for n in toposort(graph) if n.op == "weight" and "_exps" in n.name]
    return Executor(make_plan([graph], [Cpu()]), Residency()).run(x)[0], stored


def test_blocks_are_multiplied_as_they_are(tmp_path: Path) -> None:
    experts = Experts(3, 64, Routing(2, normalize=False), frozenset((0,)))
    parameters = expert_parameters("blk.0", SOURCES, experts, 96)
    kinds = {
        "blk.0.ffn_gate_exps.weight": "Q4_0",
        "blk.0.ffn_up_exps.weight": "Q8_0",
        "blk.0.ffn_down_exps.weight": "Q5_1",
    }
    writer, plain, rng = (
        gguf.GGUFWriter(tmp_path / "text.gguf", "test"),
        {},
        np.random.default_rng(0),
    )
    for name, parameter in parameters.items():
        values = rng.normal(size=parameter.shape).astype(np.float32) * 0.3
        kind = getattr(gguf.GGMLQuantizationType, kinds.get(name, "F32"))
        packed = gguf.quants.quantize(values, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        plain[name] = torch.from_numpy(
            gguf.quants.dequantize(packed, kind).reshape(parameter.shape).copy()
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    x = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    actual, stored = run(
        x, CanonicalWeights(GgufFile(tmp_path / "text.gguf"), parameters, "file"), experts
    )
    expected, wide = run(
        x, CanonicalWeights(Stored(plain, canonical=True), parameters, "file"), experts
    )
    # products of few rows take x as integers of 16 bits
    assert ((actual - expected) ** 2).mean() <= 1e-6 * (expected**2).mean()
    assert sorted(stored) == sorted(
        str(Type.contiguous(shape, torch.uint8))
        for shape in ((3, 64, 54), (3, 64, 102), (3, 96, 48))
    )
    assert not set(stored) & set(wide)


def test_the_shared_expert_is_transformers() -> None:
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextSparseMoeBlock

    config = Qwen3NextConfig(
        hidden_size=40,
        moe_intermediate_size=14,
        shared_expert_intermediate_size=22,
        num_experts=5,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    config._experts_implementation = "eager"
    block = Qwen3NextSparseMoeBlock(config).eval()
    torch.manual_seed(3)
    for p in block.parameters():
        torch.nn.init.normal_(p, std=0.3)
    experts = replace(ONE, shared=22, shared_gate=True)
    parameters = expert_parameters("blk.0", ("",), experts, 40)
    weights = CanonicalWeights(
        Stored({name: p.data for name, p in block.state_dict().items()}), parameters, "folder"
    )
    x = torch.randn(11, 40)
    with torch.no_grad():
        actual = block(x[None])
    expected = (actual[0] if isinstance(actual, tuple) else actual)[0]
    torch.testing.assert_close(run(x, weights, experts)[0], expected, rtol=1e-5, atol=1e-5)
    alone = run(x, weights, ONE)[0]
    assert (
        float((alone - expected).norm() / expected.norm()) > 0.1
    )  # the shared expert is not lost in the others
