"""Checkpoint tensors under canonical names: found, checked before anything is read, converted, and
none left over.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.canonical import (
    CanonicalWeights,
    Parameter,
    Rearranged,
    Stored,
    adjacent_pairs,
    check_no_extra,
    plus_one,
)
from mtmd.kernels.checkpoint.halves import in_halves
from mtmd.kernels.graph import Type, WeightSource
from mtmd.kernels.quantization.blocks import BLOCKS, dequantize


class File:
    """A weight file in memory; `reads` lists what was read, `kinds` says which tensors hold blocks,
    in rows of bytes.
    """

    canonical = False

    def __init__(
        self, kinds: dict[str, str] | None = None, canonical: bool = False, **tensors: Tensor
    ) -> None:
        self.kinds, self.canonical = kinds or {}, canonical
        self.tensors = {name.replace("__", "."): t for name, t in tensors.items()}
        self.reads: list[str] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        shape, kind = tuple(self.tensors[name].shape), self.kinds.get(name)
        return (
            *shape[:-1],
            shape[-1] // BLOCKS[kind].bytes * BLOCKS[kind].values,
        ) if kind else shape, self.tensors[name].dtype

    def kind(self, name: str) -> str:
        return self.kinds.get(name, "F32")

    def stored_bytes(self, name: str) -> int:
        return self.tensors[name].nbytes

    def read(self, name: str) -> Tensor:
        self.reads.append(name)
        return self.tensors[name]

    def rearranged(self, name: str, turned: bool) -> None:  # noqa: ARG002
        return None


def test_a_parameter_is_found_under_the_first_name_there_is():
    file = File(model__a=torch.ones(2, 3), b=torch.zeros(4))
    weights = CanonicalWeights(
        file, {"v.a": Parameter((2, 3), ("a", "model.a")), "v.b": Parameter((4,), ("b",))}, "folder"
    )
    assert weights.sources == {"model.a", "b"} and file.reads == []
    assert torch.equal(weights.read("v.a", torch.float32), torch.ones(2, 3)) and file.reads == [
        "model.a"
    ]


def test_types_are_told_without_reading():
    file = File(a=torch.ones(2, 3, dtype=torch.bfloat16))
    weights = CanonicalWeights(file, {"v.a": Parameter((2, 3), ("a",))}, "folder")
    assert (
        weights.type_of("v.a", torch.float32) == Type.contiguous((2, 3), torch.float32)
        and file.reads == []
    )


def test_values_come_in_the_type_and_the_layout_that_are_asked_for():
    stored = torch.randn(3, 2).bfloat16()
    weights = CanonicalWeights(
        File(a=stored),
        {"v.a": Parameter((2, 3), ("a",), stored=(3, 2), convert=torch.Tensor.t)},
        "folder",
    )
    result = weights.read("v.a", torch.float32)
    assert torch.equal(result, stored.t().float())
    assert Type.of(result) == weights.type_of("v.a", torch.float32)


def test_norms_that_store_what_is_added_to_one():
    stored = torch.tensor([-1.0, 0.0, 0.3, 2.0**-9]).bfloat16()
    weights = CanonicalWeights(
        File(a=stored), {"v.a": Parameter((4,), ("a",), convert=plus_one)}, "folder"
    )
    assert torch.equal(
        weights.read("v.a", torch.float32), stored.float() + 1
    )  # 1 + 2^-9 is not rounded to bf16
    assert torch.equal(stored, torch.tensor([-1.0, 0.0, 0.3, 2.0**-9]).bfloat16())


def test_a_missing_tensor_is_named():
    with pytest.raises(
        ModelError, match=r"folder: tensor model\.a is missing; the checkpoint is incomplete"
    ):
        CanonicalWeights(
            File(b=torch.zeros(1)), {"v.a": Parameter((1,), ("model.a", "a"))}, "folder"
        )


@pytest.mark.parametrize(
    "shape, stored",
    [((2, 4), None), ((3, 2), None), ((6,), None), ((2, 3), (3, 2)), ((1, 2, 3), None)],
)
def test_a_misshapen_tensor_is_named_with_both_shapes(shape, stored):
    with pytest.raises(
        ModelError,
        match=r"folder: tensor a has shape \[2, 3\], expected \[.*\] from the configuration",
    ):
        CanonicalWeights(
            File(a=torch.zeros(2, 3)), {"v.a": Parameter(shape, ("a",), stored=stored)}, "folder"
        )


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn]
)
def test_a_quantized_tensor_is_refused_not_taken_for_values(dtype):
    with pytest.raises(
        ModelError,
        match=r"folder: tensor a is .*, expected fp32, bf16, fp16, fp64; checkpoints quantized in this",
    ):
        CanonicalWeights(
            File(a=torch.zeros(2, 3).to(dtype)), {"v.a": Parameter((2, 3), ("a",))}, "folder"
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_plain_types_are_taken(dtype):
    weights = CanonicalWeights(
        File(a=torch.ones(2).to(dtype)), {"v.a": Parameter((2,), ("a",))}, "folder"
    )
    assert torch.equal(weights.read("v.a", torch.float32), torch.ones(2))


def test_tensors_that_nothing_uses_are_named():
    file = File(a=torch.zeros(1), head__x=torch.zeros(1), z=torch.zeros(1), y=torch.zeros(1))
    check_no_extra(file, ["a", "z", "y"], [r"head\..*"], "folder")
    with pytest.raises(ModelError, match="folder: tensor y and 1 more is not part of the model"):
        check_no_extra(file, ["a"], [r"head\..*"], "folder")
    with pytest.raises(ModelError, match=r"folder: tensor head\.x is not part"):
        check_no_extra(
            file, ["a", "y", "z"], ["head"], "folder"
        )  # a pattern has to match the whole name


def test_a_parameter_may_be_made_of_several_tensors():
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    way = Stored(("a", "b"), (2, 3), lambda *t: torch.stack(t))
    weights = CanonicalWeights(
        File(a=a, b=b), {"v": Parameter((2, 2, 3), ("fused",), others=(way,))}, "folder"
    )
    assert torch.equal(
        weights.read("v", torch.float32), torch.stack((a, b))
    ) and weights.sources == {"a", "b"}
    with pytest.raises(ModelError, match="tensor fused is missing"):
        CanonicalWeights(
            File(a=a), {"v": Parameter((2, 2, 3), ("fused",), others=(way,))}, "folder"
        )


def test_a_canonical_file_has_parameters_under_their_own_names():
    parameter = Parameter((2, 3), ("model.a",), stored=(3, 2), convert=torch.Tensor.t)
    value = torch.randn(2, 3)
    weights = CanonicalWeights(File(canonical=True, v__a=value), {"v.a": parameter}, "file")
    assert torch.equal(weights.read("v.a", torch.float32), value)


def test_blocks_stay_as_they_are_where_nothing_is_to_be_converted():
    rows = torch.randint(0, 100, (4, 2 * BLOCKS["Q8_0"].bytes), dtype=torch.uint8)
    rows[:, [1, BLOCKS["Q8_0"].bytes + 1]] = 0x3C
    file = File(
        {"v.a": "Q8_0", "v.b": "Q8_0", "v.c": "TQ2_0"},
        True,
        v__a=rows,
        v__b=rows.clone(),
        v__c=torch.zeros(4, BLOCKS["TQ2_0"].bytes, dtype=torch.uint8),
    )
    turned = Stored(("v.b",), (4, 64), torch.Tensor.t)
    weights = CanonicalWeights(
        file,
        {
            "v.a": Parameter((4, 64), ()),
            "v.b": Parameter((64, 4), (), gguf=(turned,)),
            "v.c": Parameter((4, 256), ()),
        },
        "file",
    )
    assert weights.quant("v.a") == "Q8_0" and weights.type_of(
        "v.a", torch.float32
    ) == Type.contiguous(rows.shape, torch.uint8)
    assert torch.equal(weights.read("v.a", torch.float32), rows)
    assert weights.quant("v.b") is None and weights.quant("v.c") == "TQ2_0"
    assert torch.equal(weights.read("v.b", torch.float32), dequantize(rows, "Q8_0").t())
    assert [(d.name, d.kind, d.stored_bytes, d.values) for d in weights.dequantized] == [
        ("v.b", "Q8_0", rows.numel(), 256)
    ]


def test_orders_of_columns_are_those_of_a_layer():
    """Parameters that are made of others in one order have blocks; products share the order."""
    first, second = torch.tensor([2, 0, 1, 3]).repeat(8).argsort(stable=True), torch.arange(32)
    orders = {name: (second if name in "df" else first).int() for name in "abcdefg"}

    class Ordered(File):
        def kind(self, name: str) -> str:  # noqa: ARG002
            return "GPTQ"

        def rearranged(self, name: str, turned: bool) -> Rearranged | None:
            if turned or name not in orders:
                return None
            return Rearranged("Q8_0", lambda: torch.zeros(2, 34, dtype=torch.uint8), orders[name])

    file = Ordered(**dict.fromkeys("abcdefg", torch.ones(2, 32)))
    both = partial(Parameter, (4, 32), ())
    parameters = {
        "blk.0.a.weight": Parameter((2, 32), ("a",)),
        "blk.0.b.weight": Parameter((2, 32), ("b",)),
        "blk.0.d.weight": Parameter((2, 32), ("d",)),
        "blk.1.c.weight": Parameter((2, 32), ("c",)),
        "blk.1.e.weight": both(others=(Stored(("c", "e"), (2, 32), _rows, picks_rows=True),)),
        "blk.1.f.weight": both(others=(Stored(("e", "f"), (2, 32), _rows, picks_rows=True),)),
        "blk.1.g.weight": Parameter((2, 32), ("g",), runs=32, picks_rows=True, convert=_rows),
    }
    weights = CanonicalWeights(file, parameters, "file")
    assert {name: weights.order(name) for name in parameters} == {
        "blk.0.a.weight": "blk.0.a.weight.order",
        "blk.0.b.weight": "blk.0.a.weight.order",
        "blk.0.d.weight": "blk.0.d.weight.order",
        "blk.1.c.weight": "blk.1.c.weight.order",
        "blk.1.e.weight": "blk.1.c.weight.order",
        "blk.1.f.weight": None,
        "blk.1.g.weight": None,
    }
    assert weights.quant("blk.1.e.weight") == "Q8_0" and weights.quant("blk.1.f.weight") is None
    read = weights.read("blk.0.a.weight.order", torch.int64)
    assert torch.equal(read, first) and read.dtype == torch.int64
    assert weights.type_of("blk.0.a.weight.order", torch.int64) == Type.of(read)
    assert weights.without_blocks().order("blk.0.a.weight") is None


def _rows(*tensors: Tensor) -> Tensor:
    return torch.cat(tensors)


def test_rows_of_adjacent_pairs():
    """Row i of a head goes beside row i + K/2."""
    w = torch.arange(16.0).view(8, 2)
    assert adjacent_pairs(2)(w)[:, 0].tolist() == [0, 4, 2, 6, 8, 12, 10, 14]
    assert adjacent_pairs(1)(w[:, 0]).tolist() == [0, 8, 2, 10, 4, 12, 6, 14]


OF_HALVES = {
    "a.weight": (6, 64),
    "b.weight": (6, 64),
    "wide.weight": (6, 64),
    "odd.weight": (6, 40),
    "norm.weight": (64,),
    "table": (6, 64),
}
STORED_AS = {"b.weight": torch.float16, "wide.weight": torch.float32}


def test_halves_of_which_a_graph_takes_blocks() -> None:
    draw = torch.Generator().manual_seed(0)
    tensors = {
        name.replace(".", "__"): torch.randn(shape, generator=draw).to(
            STORED_AS.get(name, torch.bfloat16)
        )
        for name, shape in OF_HALVES.items()
    }
    file = File(**tensors)
    parameters = {name: Parameter(shape, (name,)) for name, shape in OF_HALVES.items()}
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


def test_halves_that_are_changed_and_other_sources_stay() -> None:
    file = File(a=torch.ones(2, 32, dtype=torch.bfloat16))
    source = CanonicalWeights(file, {"a": Parameter((2, 32), ("a",))}, "here")
    changed = source.changed({"a": lambda w: w * 3})
    kept = in_halves(changed, lambda weights: weights.quant("a"))
    assert kept.quant("a") is None and kept.read("a", torch.float32).eq(3).all()

    class Other:
        quant = order = read = type_of = None

    other = Other()
    assert in_halves(other, repr) is other  # type: ignore[arg-type]
