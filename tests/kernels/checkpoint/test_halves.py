"""Weights of 16 bits that stay so where fp32 is computed in."""

from __future__ import annotations

import torch
from test_canonical import File

from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter
from mtmd.kernels.checkpoint.halves import in_halves
from mtmd.kernels.graph import WeightSource
from mtmd.kernels.quantization.blocks import dequantize

SHAPES = {
    "a.weight": (6, 64),
    "b.weight": (6, 64),
    "wide.weight": (6, 64),
    "odd.weight": (6, 40),
    "norm.weight": (64,),
    "table": (6, 64),
}
STORED = {"b.weight": torch.float16, "wide.weight": torch.float32}


def test_those_of_which_a_graph_takes_blocks() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name.replace(".", "__"): torch.randn(shape, generator=draw).to(
            STORED.get(name, torch.bfloat16)
        )
        for name, shape in SHAPES.items()
    }
    file = File(**tensors)
    parameters = {name: Parameter(shape, (name,)) for name, shape in SHAPES.items()}
    parameters["rows"] = Parameter(
        (4, 64), ("a.weight",), stored=(6, 64), convert=lambda w: w[2:], picks_rows=True
    )
    parameters["doubled"] = Parameter((6, 64), ("a.weight",), convert=lambda w: 2 * w)
    source = CanonicalWeights(file, parameters, "here")

    def graph(weights: WeightSource) -> None:
        for name in parameters:
            if name != "table":
                weights.quant(name)

    kept = in_halves(source, graph)
    assert not file.reads
    kinds = {name: kept.quant(name) for name in parameters}
    assert {name: kind for name, kind in kinds.items() if kind} == {
        "a.weight": "BF16_32",
        "b.weight": "F16_32",
        "rows": "BF16_32",
    }
    for name, kind in kinds.items():
        read, plain = kept.read(name, torch.float32), source.read(name, torch.float32)
        assert read.shape == kept.type_of(name, torch.float32).shape
        if kind:
            assert read.dtype == torch.uint8
            read = dequantize(read, kind)
        assert torch.equal(read, plain)
    assert kept.read("a.weight", torch.float32).data_ptr() == tensors["a__weight"].data_ptr()


def test_changed_ones_and_other_sources_stay() -> None:
    file = File(a=torch.ones(2, 32, dtype=torch.bfloat16))
    source = CanonicalWeights(file, {"a": Parameter((2, 32), ("a",))}, "here")
    changed = source.changed({"a": lambda w: w * 3})
    kept = in_halves(changed, lambda weights: weights.quant("a"))
    assert kept.quant("a") is None and kept.read("a", torch.float32).eq(3).all()

    class Other:
        quant = order = read = type_of = None

    other = Other()
    assert in_halves(other, lambda weights: None) is other  # type: ignore[arg-type]
