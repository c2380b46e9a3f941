"""A LoRA adapter for one model: what it changes, under canonical names, as matrices to multiply
with and as weights with the change in them.

What a checkpoint has turned, fused or split is so in an adapter, too: where a parameter's `convert`
moves rows and columns, the rows of b and the columns of a move with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.adapter_file import AdapterFile, Change
from mtmd.kernels.checkpoint.canonical import CanonicalWeights, Parameter, Stored
from mtmd.kernels.graph import Shape, Type

A, B = ".lora_a", ".lora_b"  # behind the name of the weight that is changed


@dataclass(frozen=True)
class Target:
    """A parameter that an adapter changes: `way` is one in which a file may hold it, and `changes`
    those of its tensors, None for one that is as it was.
    """

    parameter: Parameter
    way: Stored
    changes: tuple[Change | None, ...]

    @property
    def rank(self) -> int:
        """Return the rank of its tensors side by side."""
        return sum(c.rank for c in self.changes if c is not None)

    @property
    def embedding(self) -> bool:
        return any(c is not None and c.embedding for c in self.changes)

    @property
    def magnitude(self) -> bool:
        return any(c is not None and c.magnitude is not None for c in self.changes)

    def why_not_live(self) -> str | None:
        """Return why products cannot be changed by it as they are computed; None if they can."""
        if self.magnitude:
            return "it has magnitudes (DoRA)"
        shape = self.parameter.shape
        if len(shape) != 2 or self.way.shape[1:] != shape[1:]:
            return "it is no product of rows with one matrix"
        return (
            None if self.embedding or self.moves is not None else "its layout is not that of rows"
        )

    @cached_property
    def moves(self) -> tuple[Tensor, Tensor] | None:
        """Return which row of the tensors, one below the other, each row of the parameter is, and
        which column each column; None where `convert` does more than move whole rows and columns.
        """
        (rows, columns), count = self.way.shape, len(self.changes)
        row_of = torch.arange(rows * count, dtype=torch.int32, device="cpu").view(count, rows, 1)
        column_of = torch.arange(columns, dtype=torch.int32, device="cpu").expand(rows, columns)
        if self.way.convert is None:
            return row_of[0, :, 0], column_of[0]
        moved_rows = self.way.convert(*row_of.expand(count, rows, columns))
        moved_columns = self.way.convert(*[column_of] * count)
        are_whole = (moved_rows == moved_rows[:, :1]).all() and (
            moved_columns == moved_columns[:1]
        ).all()
        return (moved_rows[:, 0].long(), moved_columns[0].long()) if are_whole else None


class Adapter:
    """The changes of an adapter in a part of a model: a `WeightSource` of its matrices, by the name
    of the weight and `A` or `B` behind it. `targets` by the name of the weight.
    """

    def __init__(self, name: str, file: AdapterFile, targets: Mapping[str, Target]):
        self.name, self.targets, self._file = name, targets, file

    @property
    def where(self) -> str:
        return self._file.where

    def changes_product(self, weight: str) -> bool:
        return weight in self.targets and not self.targets[weight].embedding

    def changes_table(self, weight: str) -> bool:
        return weight in self.targets and self.targets[weight].embedding

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of all its matrices in memory."""
        names = (weight + part for weight in self.targets for part in (A, B))
        return sum(self.type_of(name, dtype).bytes for name in names)

    def only(self, weights: Sequence[str]) -> Adapter:
        """The same for some of the weights."""
        return Adapter(self.name, self._file, {w: self.targets[w] for w in weights})

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        target = self.targets[name.removesuffix(A).removesuffix(B)]
        rows, columns = target.parameter.shape
        if name.endswith(B):
            return Type.contiguous((columns if target.embedding else rows, target.rank), dtype)
        shape = (rows, target.rank) if target.embedding else (target.rank, columns)
        return Type.contiguous(shape, dtype)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """a [R, K], or of a table [V, R]; b [N, R], in which the adapter's scale is."""
        target = self.targets[name.removesuffix(A).removesuffix(B)]
        if name.endswith(A):
            parts = [self._value(c.a) for c in target.changes if c is not None]
            a = torch.cat(parts)
            if not target.embedding:
                assert target.moves is not None
                a = a[:, target.moves[1]]
            elif not self._file.file.canonical:
                a = a.t()
            return a.to(dtype).contiguous()
        # Each tensor's rows in columns of their own, as their a's lie one below the other
        rows = target.parameter.shape[1] if target.embedding else target.way.shape[0]
        b, at = torch.zeros(len(target.changes), rows, target.rank, device="cpu"), 0
        for part, change in zip(b, target.changes, strict=True):
            if change is not None:
                part[:, at : at + change.rank] = self._value(change.b) * change.scale
                at += change.rank
        b = b.flatten(0, 1)
        if not target.embedding:
            assert target.moves is not None
            b = b[target.moves[0]]
        return b.to(dtype).contiguous()

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def merged(self, weight: str, scale: float, value: Tensor) -> Tensor:
        """A parameter's fp32 value with the change in it, `scale` times."""
        target = self.targets[weight]
        deltas = [self._delta(change, target.way.shape, scale) for change in target.changes]
        delta = target.way.convert(*deltas) if target.way.convert else deltas[0]
        result = value + delta.reshape(value.shape)
        if not target.magnitude:
            return result
        (change,) = target.changes
        assert change is not None and change.magnitude is not None
        lengths = self._value(change.magnitude).reshape(-1, 1)
        lengths = target.way.convert(lengths) if target.way.convert else lengths
        scaled: Tensor = result * (lengths / torch.linalg.norm(result, dim=1, keepdim=True))
        return scaled

    def _delta(self, change: Change | None, shape: Shape, scale: float) -> Tensor:
        if change is None:
            return torch.zeros(shape, device="cpu")
        a, b = self._value(change.a), self._value(change.b) * (change.scale * scale)
        if not change.among:
            return b @ a
        experts = shape[0]  # rows of a expert by expert, columns of b rank by rank
        a, b = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts)
        return torch.einsum("ore,eri->eoi", b, a)

    def _value(self, name: str) -> Tensor:
        return self._file.file.read(name).float()


def adapters_of(
    name: str, file: AdapterFile, parts: Sequence[Mapping[str, Parameter]]
) -> list[Adapter]:
    """Return what a file changes of each of a model's `parts` (its parameters). Raises ModelError
    naming a weight that the model does not have, or has in another shape.
    """
    canonical = file.file.canonical
    targets: list[dict[str, Target]] = [{} for _ in parts]
    used = set[str]()
    for part, parameters in zip(targets, parts, strict=True):
        for weight, parameter in parameters.items():
            target = _target(file, parameter, list(parameter.ways(weight, canonical)), used)
            if target is not None:
                part[weight] = target
    if unknown := sorted(file.changes.keys() - used):
        wrong, more = unknown[0], f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        made_for = f" (it says it was made for {file.base:.80})" if file.base else ""
        raise ModelError(
            f"{file.where}: {wrong.removesuffix('.weight'):.120}{more} of shape "
            f"{list(file.changes[wrong].shape)} is no weight of this model{made_for}; expected an "
            "adapter that was trained for it"
        )
    return [Adapter(name, file, part) for part in targets]


def _target(
    file: AdapterFile, parameter: Parameter, ways: Sequence[Stored], used: set[str]
) -> Target | None:
    for way in ways:
        names = way.names if len(way.shape) == 2 else _of_experts(file, way)
        changes = tuple(file.changes.get(name) for name in names)
        given = [c for c in changes if c is not None]
        if not given:
            continue
        if any(c.shape != tuple(way.shape[-2:]) for c in given):
            continue
        if any(c.magnitude is not None for c in given) and len(way.names) > 1:
            raise ModelError(
                f"{file.where}: {way.names[0]:.120} has magnitudes (DoRA) and is one of several "
                "tensors that are used as one; merge it with PEFT's merge_and_unload()"
            )
        used.update(name for name in names if name in file.changes)
        return Target(parameter, way, changes)
    return None


def _of_experts(file: AdapterFile, way: Stored) -> tuple[str, ...]:
    """Return the name of the change of a table of experts; () where there is none."""
    if len(way.shape) != 3:
        return ()
    fitting = [
        name
        for name, change in file.changes.items()
        if way.names[0] in change.among
        and change.shape == tuple(way.shape[-2:])
        and change.rank % way.shape[0] == 0
    ]
    if len(fitting) > 1:
        raise ModelError(
            f"{file.where}: {fitting[0]:.120} and {fitting[1]:.120} may both be of "
            f"{way.names[0]:.120}; merge the adapter with PEFT's merge_and_unload()"
        )
    return tuple(fitting)


def merged(
    weights: CanonicalWeights, adapter: Adapter, scale: float
) -> tuple[CanonicalWeights, Adapter]:
    """The weights with an adapter's changes in those that are plain numbers, and what is left of
    the adapter: the products of the others have to be changed.
    """
    plain = [
        weight
        for weight, target in adapter.targets.items()
        if not target.embedding and weights.quant(weight) is None
    ]
    changes = {weight: partial(adapter.merged, weight, scale) for weight in plain}
    return weights.changed(changes), adapter.only([w for w in adapter.targets if w not in plain])
