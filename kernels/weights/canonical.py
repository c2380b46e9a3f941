"""Checkpoint tensors under one set of names and one layout, GGUF's, whatever file they come from."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from mtmd.kernels.dtype import name_of
from mtmd.kernels.errors import ModelError
from mtmd.kernels.graph import Shape, Type

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # types whose values mean what they say


class WeightFile(Protocol):
    """A file of named tensors whose shapes can be read without their values."""

    def names(self) -> Iterable[str]: ...
    def meta(self, name: str) -> tuple[Shape, torch.dtype]: ...
    def read(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True)
class Parameter:
    """A canonical tensor: its shape, the names it may have in a checkpoint, and how it is stored there if not as it is."""
    shape: Shape
    sources: tuple[str, ...]
    stored: Shape | None = None
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None


class CanonicalWeights:
    """A `WeightSource` over a file: every parameter found and of the right shape before anything is read."""

    def __init__(self, file: WeightFile, parameters: Mapping[str, Parameter], where: str):
        """Raises ModelError naming the first tensor that is missing, misshapen or of a type that would need scales.

        `where` names the checkpoint in errors.
        """
        self._file, self._parameters = file, dict(parameters)
        self._source: dict[str, str] = {}
        present = set(file.names())
        for name, parameter in parameters.items():
            source = next((s for s in parameter.sources if s in present), None)
            if source is None:
                raise ModelError(f"{where}: tensor {parameter.sources[0]} is missing; the checkpoint is incomplete, fetch it again")
            (found, dtype), expected = file.meta(source), parameter.stored or parameter.shape
            if tuple(found) != expected:
                raise ModelError(f"{where}: tensor {source} has shape {list(found)}, expected {list(expected)} from config.json")
            if dtype not in PLAIN:
                raise ModelError(f"{where}: tensor {source} is {name_of(dtype)}, expected {', '.join(map(name_of, PLAIN))}; "
                                 "quantized checkpoints are not read, use the original one")
            self._source[name] = source

    @property
    def sources(self) -> set[str]:
        """The names in the file that are used."""
        return set(self._source.values())

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self._parameters[name].shape, dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        tensor, convert = self._file.read(self._source[name]), self._parameters[name].convert
        return (convert(tensor) if convert else tensor).to(dtype).contiguous()


def check_no_extra(file: WeightFile, used: Iterable[str], ignored: Iterable[str], where: str) -> None:
    """Raises ModelError naming tensors that no part of the model uses, less those matching the `ignored` patterns."""
    patterns = [re.compile(p) for p in ignored]
    extra = sorted(n for n in set(file.names()) - set(used) if not any(p.fullmatch(n) for p in patterns))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise ModelError(f"{where}: tensor {extra[0]}{more} is not part of the model that config.json describes; "
                         "wrong config or wrong weights")


def plus_one(tensor: torch.Tensor) -> torch.Tensor:
    """Gemma stores norm weights as w and applies 1 + w; we store what is applied, as GGUF does."""
    return tensor.float() + 1
