"""What is predicted of this card without the card: by the table of cards and the estimate that
`mtmd warmup --target` prints.
"""

from __future__ import annotations

import functools
from typing import Any

from gpu_kernels.rows import Cells, Setting, SkipError


def card_of(setting: Setting) -> Any:
    """The table's card of the device; in a dry run one that it has."""
    import torch

    from mtmd.base.errors import OptionError
    from mtmd.kernels.estimate.cards import CARDS, find_card

    name = "H200" if setting.dry else torch.cuda.get_device_name(setting.device)
    try:
        return find_card(name)
    except OptionError as unknown:  # with its memory or its socket in its name
        words = name.lower().replace("-", " ").split()
        result = [card for card in CARDS.values() if card.name in words]
        if not result:
            raise SkipError(str(unknown)) from unknown
        return result[0]


def cells_of(op: str, inputs: Any, options: dict[str, Any], ms: float, setting: Setting) -> Cells:
    """What one run of an op's kernel was predicted to take, beside what it took; dashes on a card
    that nothing is published of.
    """
    try:
        expected = kernel_ms(op, inputs, options, setting)
    except SkipError:
        return {"estimated ms": "-", "estimated / measured": "-"}
    return {"estimated ms": expected, "estimated / measured": expected / ms}


def kernel_ms(op: str, inputs: Any, options: dict[str, Any], setting: Setting) -> float:
    """Milliseconds of the device, in the middle of the range. Raises SkipError."""
    from mtmd.kernels.estimate.launches import Cost
    from mtmd.kernels.estimate.roofline import MIDDLE, factors_of, node_time
    from mtmd.kernels.estimate.unpacking import unpacking
    from mtmd.kernels.graph import Node, Type
    from mtmd.kernels.kernel import types_of
    from mtmd.kernels.ops import OPS

    card = card_of(setting)
    leaves = [x if x is None else Node("input", (), Type.of(x)) for x in inputs]
    node = OPS[op](*leaves, **options)
    kernel = _target(card.target).choose(node).kernel
    if kernel is None:
        raise SkipError(f"{op}: no kernel of ours")
    launches = kernel.launches(*types_of(node), **node.attrs)
    used = Cost(0, launches, OPS[op].bytes(node), unpacking(node, kernel))
    seconds, _ = node_time(node, used, card, factors_of(card)[MIDDLE])
    return seconds * 1e3


@functools.cache
def _target(target: str) -> Any:
    from mtmd.kernels.backends.target import Target

    return Target(target)
