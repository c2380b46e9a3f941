"""Flash attention on, off, or on where the backend takes it: the decision of the warm-up.

Builders never choose: they call an `AttentionForm`, which makes one `attention` node or the explicit three. `choose` builds the
flash form, asks the preferred backend about every attention node at every size given, and answers with the form to build.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd.kernels import ops
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.errors import OptionError
from mtmd.kernels.graph import Node
from mtmd.kernels.scheduler import Override, Refusal, make_plan

SETTINGS = ("auto", "on", "off")


@dataclass(frozen=True)
class AttentionForm:
    """Which attention nodes, by name, are built explicitly; `all_explicit` for every one."""
    explicit: frozenset[str] = frozenset()
    all_explicit: bool = False

    def __call__(self, q: Node, k: Node, v: Node, mask: Node | None = None, bounds: Node | None = None, *, name: str, scale: float,
                 softcap: float | None = None, **limits: Any) -> Node:
        """softmax(q k^T * scale) v          q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V]"""
        if not self.all_explicit and name not in self.explicit:
            return ops.attention(q, k, v, mask, bounds, scale=scale, softcap=softcap, name=name, **limits)
        scores = ops.attn_scores(q, k, mask, scale=scale, softcap=softcap, name=f"{name}.scores")
        weights = ops.attn_softmax(scores, bounds, name=f"{name}.softmax", **limits)
        return ops.attn_mix(weights, v, name=name)


@dataclass(frozen=True)
class FlashChoice:
    """What was asked for, what is built, and the attention nodes that the preferred backend refused on the way."""
    setting: str
    form: AttentionForm
    refusals: tuple[Refusal, ...]
    total: int

    @property
    def state(self) -> str:
        """on, off or mixed: how the attention nodes run."""
        if self.form.all_explicit or len(self.form.explicit) == self.total:
            return "off"
        return "mixed" if self.form.explicit else "on"


def choose(build: Callable[[AttentionForm], Sequence[Sequence[Node]]], backends: Sequence[Backend], overrides: Sequence[Override],
           setting: str) -> FlashChoice:
    """Ask the preferred backend about every attention node of every graph that `build` makes, one graph per size to be expected.

    auto: nodes it refuses at any size are built explicitly, the others stay. on: all stay, refused or not. off: none are asked.
    """
    if setting not in SETTINGS:
        raise OptionError(f"flash_attn {setting!r}: expected one of {', '.join(SETTINGS)}")
    if setting == "off":
        return FlashChoice(setting, AttentionForm(all_explicit=True), (), 0)
    refused: dict[str, Refusal] = {}
    names: set[str] = set()
    for outputs in build(AttentionForm()):
        plan = make_plan(outputs, backends, overrides)
        names |= {s.node.name for s in plan.steps if s.node.op == "attention"}
        for refusal in plan.refusals:
            if refusal.node.op == "attention" and refusal.backend == backends[0].name:
                refused.setdefault(refusal.node.name, refusal)
    explicit = frozenset(refused) if setting == "auto" else frozenset()
    return FlashChoice(setting, AttentionForm(explicit), tuple(refused.values()), len(names))
