"""Checkpoint tensors under canonical names: found, checked before anything is read, converted, and none left over."""
from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Type
from mtmd.kernels.weights.canonical import CanonicalWeights, Parameter, check_no_extra, plus_one


class File:
    """A weight file in memory; `reads` lists what was read."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = {name.replace("__", "."): t for name, t in tensors.items()}
        self.reads: list[str] = []

    def names(self) -> list[str]:
        return list(self.tensors)

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.tensors[name].shape), self.tensors[name].dtype

    def read(self, name: str) -> Tensor:
        self.reads.append(name)
        return self.tensors[name]


def test_a_parameter_is_found_under_the_first_name_there_is():
    file = File(model__a=torch.ones(2, 3), b=torch.zeros(4))
    weights = CanonicalWeights(file, {"v.a": Parameter((2, 3), ("a", "model.a")), "v.b": Parameter((4,), ("b",))}, "folder")
    assert weights.sources == {"model.a", "b"} and file.reads == []
    assert torch.equal(weights.read("v.a", torch.float32), torch.ones(2, 3)) and file.reads == ["model.a"]


def test_types_are_told_without_reading():
    file = File(a=torch.ones(2, 3, dtype=torch.bfloat16))
    weights = CanonicalWeights(file, {"v.a": Parameter((2, 3), ("a",))}, "folder")
    assert weights.type_of("v.a", torch.float32) == Type.contiguous((2, 3), torch.float32) and file.reads == []


def test_values_come_in_the_type_and_the_layout_that_are_asked_for():
    stored = torch.randn(3, 2).bfloat16()
    weights = CanonicalWeights(File(a=stored), {"v.a": Parameter((2, 3), ("a",), stored=(3, 2), convert=torch.Tensor.t)}, "folder")
    found = weights.read("v.a", torch.float32)
    assert torch.equal(found, stored.t().float())
    assert Type.of(found) == weights.type_of("v.a", torch.float32)


def test_norms_that_store_what_is_added_to_one():
    stored = torch.tensor([-1.0, 0.0, 0.3, 2.0**-9]).bfloat16()
    weights = CanonicalWeights(File(a=stored), {"v.a": Parameter((4,), ("a",), convert=plus_one)}, "folder")
    assert torch.equal(weights.read("v.a", torch.float32), stored.float() + 1)  # 1 + 2^-9 is not rounded to bf16
    assert torch.equal(stored, torch.tensor([-1.0, 0.0, 0.3, 2.0**-9]).bfloat16())


def test_a_missing_tensor_is_named():
    with pytest.raises(ModelError, match=r"folder: tensor model\.a is missing; the checkpoint is incomplete"):
        CanonicalWeights(File(b=torch.zeros(1)), {"v.a": Parameter((1,), ("model.a", "a"))}, "folder")


@pytest.mark.parametrize("shape, stored", [((2, 4), None), ((3, 2), None), ((6,), None), ((2, 3), (3, 2)), ((1, 2, 3), None)])
def test_a_misshapen_tensor_is_named_with_both_shapes(shape, stored):
    with pytest.raises(ModelError, match=r"folder: tensor a has shape \[2, 3\], expected \[.*\] from config.json"):
        CanonicalWeights(File(a=torch.zeros(2, 3)), {"v.a": Parameter(shape, ("a",), stored=stored)}, "folder")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_a_quantized_tensor_is_refused_not_taken_for_values(dtype):
    with pytest.raises(ModelError, match=r"folder: tensor a is .*, expected fp32, bf16, fp16, fp64; quantized checkpoints are not read"):
        CanonicalWeights(File(a=torch.zeros(2, 3).to(dtype)), {"v.a": Parameter((2, 3), ("a",))}, "folder")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_plain_types_are_taken(dtype):
    weights = CanonicalWeights(File(a=torch.ones(2).to(dtype)), {"v.a": Parameter((2,), ("a",))}, "folder")
    assert torch.equal(weights.read("v.a", torch.float32), torch.ones(2))


def test_tensors_that_nothing_uses_are_named():
    file = File(a=torch.zeros(1), head__x=torch.zeros(1), z=torch.zeros(1), y=torch.zeros(1))
    check_no_extra(file, ["a", "z", "y"], [r"head\..*"], "folder")
    with pytest.raises(ModelError, match="folder: tensor y and 1 more is not part of the model"):
        check_no_extra(file, ["a"], [r"head\..*"], "folder")
    with pytest.raises(ModelError, match=r"folder: tensor head\.x is not part"):
        check_no_extra(file, ["a", "y", "z"], ["head"], "folder")  # a pattern has to match the whole name
