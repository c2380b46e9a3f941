"""Flash attention on, off, or on where the backend takes it: the decision of the warm-up.

Builders never choose: they call an `AttentionForm`, which makes one `attention` node or the
explicit three. `choose` builds the flash form, asks the preferred backend about every attention
node at every size given, and answers with the form to build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.kernels import ops
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.graph import Node, toposort
from mtmd.kernels.plan.layer_split import LayerSplit
from mtmd.kernels.plan.scheduler import Override, Refusal

SETTINGS = ("auto", "on", "off")
EXPLICIT = ("attn_scores", "attn_softmax", "attn_mix")


@dataclass(frozen=True)
class AttentionForm:
    """Form of attention: the nodes, by name, that are built explicitly; `all_explicit` for every
    one.
    """

    explicit: frozenset[str] = frozenset()
    all_explicit: bool = False

    def __call__(
        self,
        q: Node,
        k: Node,
        v: Node,
        mask: Node | None = None,
        bounds: Node | None = None,
        *,
        name: str,
        scale: float,
        softcap: float | None = None,
        mask_capped: bool = False,
        **limits: Any,
    ) -> Node:
        """softmax(q k^T * scale) v

        q [B, T, H, K], k [B, S, G, K], v [B, S, G, V] -> [B, T, H, V]
        """
        scored: dict[str, Any] = {"scale": scale, "softcap": softcap}
        if mask_capped:
            scored["mask_capped"] = True
        if not self.all_explicit and name not in self.explicit:
            return ops.attention(q, k, v, mask, bounds, name=name, **scored, **limits)
        scores = ops.attn_scores(q, k, mask, name=f"{name}.scores", **scored)
        weights = ops.attn_softmax(scores, bounds, name=f"{name}.softmax", **limits)
        return ops.attn_mix(weights, v, name=name)


@dataclass(frozen=True)
class FlashChoice:
    """Choice of flash attention: what was requested, what is built, and the attention nodes that
    the preferred backend refused on the way.
    """

    setting: str
    form: AttentionForm
    refusals: tuple[Refusal, ...]
    total: int

    @property
    def state(self) -> str:
        """State of the attention nodes, on, off or mixed: how the attention nodes run."""
        if self.form.all_explicit or len(self.form.explicit) == self.total:
            return "off"
        return "mixed" if self.form.explicit else "on"


def choose(
    build: Callable[[AttentionForm], Sequence[Sequence[Node]]],
    backends: Sequence[Backend],
    overrides: Sequence[Override],
    setting: str,
    split: LayerSplit | None = None,
) -> FlashChoice:
    """Ask the preferred backend about every attention node of every graph that `build` makes, one
    graph per size to be expected; of several devices the one that is to have the node.

    auto: nodes it refuses at any size are built explicitly, the others stay. on: all stay, refused
    or not. off: none are asked. A node whose explicit form it refuses too stays as well: either way
    it leaves the device, and flash attention takes less memory. Nodes that an override places are
    not asked about: they stay.
    """
    if setting not in SETTINGS:
        raise OptionError(f"flash_attn {setting!r}: expected one of {', '.join(SETTINGS)}")
    if setting == "off":
        return FlashChoice(setting, AttentionForm(all_explicit=True), (), 0)
    requested, names = _ask(build(AttentionForm()), backends[0], overrides, ("attention",), split)
    explicit = frozenset(requested) if setting == "auto" else frozenset()
    if explicit:
        still, _ = _ask(build(AttentionForm(explicit)), backends[0], overrides, EXPLICIT, split)
        explicit -= {name.removesuffix(".scores").removesuffix(".softmax") for name in still}
    return FlashChoice(setting, AttentionForm(explicit), tuple(requested.values()), len(names))


def _ask(
    graphs: Sequence[Sequence[Node]],
    backend: Backend,
    overrides: Sequence[Override],
    ops_requested: Sequence[str],
    split: LayerSplit | None,
) -> tuple[dict[str, Refusal], set[str]]:
    """The first refusal of each node of these ops, by name, and the names of all of them."""
    refused: dict[str, Refusal] = {}
    names: set[str] = set()
    for outputs in graphs:
        nodes = toposort(*outputs)
        homes = split.homes(nodes) if split else {}
        for node in (n for n in nodes if n.op in ops_requested):
            names.add(node.name)
            requested = homes.get(node, backend)
            reason = None if any(o.matches(node) for o in overrides) else requested.rejects(node)
            if reason is not None:
                refused.setdefault(node.name, Refusal(node, requested.name, reason))
    return refused, names
