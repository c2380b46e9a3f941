"""Choice of the kernel that runs an attention node of an encoder: ours, as it comes or with another
tile, or one of torch's own, by what was measured on this card.

A measurement stands for a class of shapes (`ShapeClass`), is made by the warm-up and kept on disk;
without one ours runs. A kernel that was chosen and refuses all the same, when it is launched, is
not asked again, which the log, the report and receipts tell.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from mtmd.base.text import one_line, printable
from mtmd.kernels.backends.backend import Run
from mtmd.kernels.backends.vision_attention.candidates import CANDIDATES, PLANNED, Tiled
from mtmd.kernels.backends.vision_attention.measure import Error, Probe, measure
from mtmd.kernels.backends.vision_attention.saved_measurements import Saved
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.launch import power_of_two
from mtmd.kernels.gpu.triton_kernel import Program
from mtmd.kernels.graph import Node, Type
from mtmd.kernels.kernel import Kernel, types_of
from mtmd.kernels.ops import OPS
from mtmd.kernels.trials import ClassFacts, Learned, Measured

SETTINGS = ("auto", "triton", "torch")
OURS = "triton"
MIN_FLOPS = 1e9  # of a node, for which a choice is made: smaller ones take microseconds
WORTH = 0.97  # of our time, at most, for another kernel to run: clocks differ by as much
log = logging.getLogger("mtmd.kernels")


@dataclass(frozen=True)
class ShapeClass:
    """Nodes for which one measurement stands: batch, rows and keys are the next powers of two.
    `separate`: queries, keys and values have memory of their own.
    """

    dtype: str
    heads: int
    head: int
    batch: int
    rows: int
    keys: int
    causal: bool
    separate: bool

    def __str__(self) -> str:
        text = (
            f"{self.dtype}, {self.heads} heads of {self.head}, up to {self.batch} x {self.rows} "
            f"rows over {self.keys} keys"
        )
        text += ", causal" if self.causal else ""
        return text if self.separate else f"{text}, parts of one tensor"


def class_of(node: Node) -> ShapeClass:
    q, k, v = (i.type for i in tuple(node.operands)[:3])
    return ShapeClass(
        name_of(q.dtype),
        q.shape[2],
        q.shape[3],
        power_of_two(q.shape[0]),
        power_of_two(q.shape[1]),
        power_of_two(k.shape[1]),
        bool(node.attrs.get("causal")),
        all(kind.is_contiguous for kind in (q, k, v)),
    )


class Way(NamedTuple):
    """Way in which a node runs: by the kernel of a name, None for ours, and why so."""

    name: str
    kernel: Kernel | None
    why: str


@dataclass(eq=False)
class AttentionChoice:
    """Choice for one device. `saved`: what earlier processes have measured there."""

    saved: Saved | None = None
    candidates: Mapping[str, Kernel] = field(default_factory=lambda: CANDIDATES)
    setting: str = "auto"
    one_shape: bool = False
    """Whether all tiles of the encoder have one shape."""
    failed: dict[tuple[ShapeClass, str], str] = field(default_factory=dict)
    """Kernels that were chosen and refused when they were launched, with their words."""
    used: dict[ShapeClass, str] = field(default_factory=dict)
    """By which kernel shapes run for which there is a choice."""
    learned: Learned = field(default_factory=lambda: Learned((), ()))
    """What the last warm-up found out."""

    def __post_init__(self) -> None:
        self._known: dict[ShapeClass, Measured] = {}

    def way(self, node: Node) -> Way:
        """Return how an attention node runs that ours takes."""
        if self.setting != "torch" and (reason := _too_small(node)):
            return Way(OURS, None, reason)
        shape, takers = class_of(node), self._takers(node)
        refused = {n: r for n, r in takers.items() if isinstance(r, str)}
        able = [name for name in takers if name not in refused]
        if not able:
            reported = "; ".join(f"{name}: {reason}" for name, reason in refused.items())
            return Way(OURS, None, f"no other supports it ({reported})")
        measured = self._measured(shape)
        if measured is None:
            if self.setting != "torch":
                return Way(OURS, None, "not measured")
            return Way(able[0], self.candidates[able[0]], "requested, not measured")
        times = {t.name: t.ms for t in measured.trials if t.ms is not None}
        best = min((n for n in able if n in times), key=times.__getitem__, default=None)
        if best is None:
            return Way(OURS, None, "the others were refused when they were measured")
        if self.setting != "torch" and not times[best] < WORTH * times.get(OURS, float("inf")):
            return Way(OURS, None, "measured")
        why = "requested, the fastest of torch's" if self.setting == "torch" else "measured"
        return Way(best, self.candidates[best], why)

    def workspace(self, node: Node, ours: int) -> int:
        """The most that any kernel takes which may run the node, now or once it is measured."""
        if self.setting != "torch" and _too_small(node):
            return ours
        types = types_of(node)
        able = [n for n, reason in self._takers(node).items() if reason is None]
        return max(ours, *(self.candidates[n].workspace(*types, **node.attrs) for n in able), 0)

    def programs(self, node: Node, types: Sequence[Type | None]) -> list[Program]:
        """Return what is launched for a node by Triton's candidates that may run it, beside ours:
        by the one that was measured to be the fastest, or, as long as that is not known, by all
        that take it. `types`: of its inputs, with where they lie.
        """
        if self._not_measured(node) is not None:
            return []
        able = [name for name, reason in self._takers(node).items() if reason is None]
        names = able if self._measured(class_of(node)) is None else [self.way(node).name]
        result = (self.candidates.get(name) for name in names)
        return [
            program
            for kernel in result
            if isinstance(kernel, Tiled)
            for program in kernel.programs(*types, **node.attrs)
            if program.call.programs
        ]

    def lower(self, node: Node, ours: Run) -> Run:
        way = self.way(node)
        if self._not_measured(node) is None:
            self.used[class_of(node)] = way.name
        else:
            self.used.pop(class_of(node), None)
        return ours if way.kernel is None else _Watched(self, node, way, ours)

    def learn(
        self,
        nodes: Iterable[Node],
        probe: Probe,
        ours: Kernel,
        error: Error,
        limits: Mapping[torch.dtype, float],
    ) -> Learned:
        """Measure each class of the nodes that is not known, or of which a kernel was refused for
        what may have passed, by its largest. Raises DeviceError.
        """
        largest: dict[ShapeClass, Node] = {}
        unasked: dict[str, int] = {}
        for node in nodes:
            reason = self._not_measured(node)
            if reason is not None:
                unasked[reason] = unasked.get(reason, 0) + 1
                continue
            shape = class_of(node)
            if shape not in largest or _flops(node) > _flops(largest[shape]):
                largest[shape] = node
        result = []
        for shape, node in largest.items():
            measured = self._measured(shape)
            saved = measured is not None and measured.lasting
            if measured is None or not measured.lasting:
                kernels = {OURS: ours, **self._requested()}
                measured = measure(node, kernels, probe, error, limits[node.dtype])
                measured = _alongside(measured, self._result(shape))
                self._known[shape] = measured
                if self.saved:
                    self.saved.add(str(shape), measured)
            result.append(ClassFacts(str(shape), self.way(node).name, saved, measured))
        self.learned = Learned(tuple(result), tuple(unasked.items()))
        return self.learned

    def give_up(self, node: Node, name: str, error: Exception) -> None:
        """A kernel was chosen for a node, and refused it."""
        words = printable(one_line(error, 200))
        self.failed[class_of(node), name] = words
        self.used[class_of(node)] = OURS
        log.warning(
            "%s attention refused %s, for which it was chosen (%s); ours runs it from now on",
            name,
            class_of(node),
            words,
        )

    def _not_measured(self, node: Node) -> str | None:
        if reason := _too_small(node):
            return reason
        refused = self._takers(node)
        if all(refused.values()):
            return "; ".join(
                sorted({f"no other supports such a node: {r}" for r in refused.values()})
            )
        return None

    def _requested(self) -> dict[str, Kernel]:
        """The candidates that the setting leaves."""
        return {
            name: kernel
            for name, kernel in self.candidates.items()
            if (self.setting == "auto" and name not in self.left_out())
            or name.startswith(self.setting)
        }

    def left_out(self) -> dict[str, str]:
        """Candidates that "auto" never asks, and why."""
        if self.one_shape or self.setting != "auto":
            return {}
        return {name: why for name, why in PLANNED.items() if name in self.candidates}

    def _takers(self, node: Node) -> dict[str, str | None]:
        """Return for each candidate None, or why it does not take the node."""
        types, shape = types_of(node), class_of(node)
        return {
            name: self.failed.get((shape, name)) or kernel.rejects(*types, **node.attrs)
            for name, kernel in self._requested().items()
        }

    def _measured(self, shape: ShapeClass) -> Measured | None:
        """None unless every candidate was tried, which those that were not asked for were not."""
        result = self._result(shape)
        tried = {trial.name for trial in result.trials} if result else set()
        return result if tried >= self._requested().keys() else None

    def _result(self, shape: ShapeClass) -> Measured | None:
        result = self._known.get(shape)
        if result is None and self.saved is not None:
            result = self.saved.get(str(shape))
            if result is not None:
                self._known[shape] = result
        return result


class _Watched:
    """A run by another kernel than ours, and by ours where that refuses."""

    def __init__(self, choice: AttentionChoice, node: Node, way: Way, ours: Run):
        self._choice, self._node, self._ours = choice, node, ours
        self._name, self._kernel = way.name, way.kernel

    def __call__(self, *inputs: Tensor | None) -> Tensor:
        if self._kernel is None:
            return self._ours(*inputs)
        try:
            return self._kernel.run(*inputs, **self._node.attrs)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise  # of the device, not of what the kernel supports
        except RuntimeError as error:
            self._choice.give_up(self._node, self._name, error)
            self._kernel = None
            return self._ours(*inputs)


def _alongside(new: Measured, old: Measured | None) -> Measured:
    """Add the earlier trials that were not made again."""
    made = {trial.name for trial in new.trials}
    saved = tuple(t for t in (old.trials if old else ()) if t.name not in made)
    return replace(new, trials=new.trials + saved)


def _flops(node: Node) -> int:
    return OPS[node.op].flops(node)


def _too_small(node: Node) -> str | None:
    if _flops(node) < MIN_FLOPS:
        return f"below {MIN_FLOPS / 1e9:.0f} GFLOP"
    return None
