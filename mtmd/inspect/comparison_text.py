"""What `mtmd compare` prints."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from mtmd.inspect.comparison import (
    KEPT,
    ImageDifference,
    ModelComparison,
    NodeDifference,
    SideFacts,
)

COLUMNS = 100
LABEL = 11


def render(told: ModelComparison) -> str:
    return "\n".join(
        line.rstrip()
        for line in (*_sides(told), "", *_request(told), *_nodes(told), "", *_verdict(told))
    )


def _sides(told: ModelComparison) -> Iterator[str]:
    for label, side in (("A", told.a), ("B", told.b)):
        yield f"{label}  {_side(side)}"


def _side(side: SideFacts) -> str:
    states = set(side.flash.values())
    flash = (
        states.pop()
        if len(states) == 1
        else ", ".join(f"{state} in the {graph}" for graph, state in side.flash.items())
    )
    kinds = dict.fromkeys(kind for kinds in side.types.values() for kind in kinds)
    return (
        f"{side.name} ({', '.join(kinds)}) on {side.device} in {side.dtype}, flash attention "
        f"{flash}"
    )


def _request(told: ModelComparison) -> Iterator[str]:
    prompt, logits = told.prompt, told.logits
    if prompt.first is None:
        yield from _row("prompt", f"{prompt.tokens_a} tokens, the same ids")
    else:
        at, *ids = prompt.first
        a, b = ("no more tokens" if i is None else f"id {i}" for i in ids)
        yield from _row(
            "prompt",
            f"{prompt.tokens_a} tokens in A, {prompt.tokens_b} in B; DIFFERENT at token {at}: {a} "
            f"in A, {b} in B",
        )
    for number, image in enumerate(told.images, 1):
        yield from _row(f"image {number}", _image(image))
    same = logits.top_a == logits.top_b
    top = (
        f"the same most probable token, {logits.top_a}"
        if same
        else f"most probable token {logits.top_a} in A, {logits.top_b} in B"
    )
    yield from _row("logits", f"NMSE {_number(logits.nmse)}; {top}")
    steps = (
        f"; logits NMSE {_number(logits.worst_nmse)} at worst in {logits.steps} steps"
        if logits.steps > 1
        else ""
    )
    yield from _row("greedy", f"{told.agreed} of {len(told.tokens_a)} tokens agree{steps}")
    if told.tokens_a != told.tokens_b:
        yield from (
            f"{'':<{LABEL}}{label}: {text!r:.{COLUMNS - LABEL - 3}}"
            for label, text in zip("AB", told.texts, strict=True)
        )


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL
    )


def _image(image: ImageDifference) -> str:
    tiles = _tiles(image.tiles_a)
    if image.tiles_a != image.tiles_b or image.tokens_a != image.tokens_b:
        return (
            f"DIFFERENT: {tiles}, {image.tokens_a} tokens in A; {_tiles(image.tiles_b)}, "
            f"{image.tokens_b} tokens in B"
        )
    return (
        f"{tiles}, {image.tokens_a} tokens; NMSE of pixels {_number(image.pixel_nmse)}, of "
        f"embeddings {_number(image.embedding_nmse)}"
    )


def _tiles(sizes: tuple[tuple[int, int], ...]) -> str:
    return " and ".join(
        f"{n} tile{'s' if n > 1 else ''} of {w} x {h}" for (w, h), n in Counter(sizes).items()
    )


def _nodes(told: ModelComparison) -> Iterator[str]:
    part = f", {told.in_part} of them by {KEPT:,} values, evenly spread" if told.in_part else ""
    yield from _row("nodes", f"{told.compared} compared{part}")
    for label, side in (("A", told.only_a), ("B", told.only_b)):
        if side.first:
            graph, name, op = side.first
            yield from _row("", f"{side.count} only in {label}, first {graph} {name} ({op})")
    if told.largest and told.largest.nmse == 0:
        yield from _row("", "every value the same")
    elif told.largest and (
        told.first is None or told.first.nmse is not None
    ):  # after other shapes, all else differs too
        yield from _row(
            "",
            f"largest NMSE {_number(told.largest.nmse)} at {told.largest.graph} "
            f"{told.largest.name} ({told.largest.op})",
        )
    if told.first:
        yield from _first(told.first)


def _first(node: NodeDifference) -> Iterator[str]:
    again = f", run {node.occurrence + 1} of it" if node.occurrence else ""
    yield ""
    yield (
        f"first node beyond the tolerance: {node.graph} {node.name} ({node.op}){again}, NMSE "
        f"{_number(node.nmse)}"
    )
    for label, dtype, shape, norm in (
        ("A", node.dtype_a, node.shape_a, node.norm_a),
        ("B", node.dtype_b, node.shape_b, node.norm_b),
    ):
        yield f"  {label}  {dtype} {list(shape)}, norm {norm:.6g}"
    if node.values < node.total:
        yield f"  NMSE and norms are of {node.values:,} of its {node.total:,} values"


def _verdict(told: ModelComparison) -> Iterator[str]:
    limits = {
        graph: f"{limit:.1e}"
        for graph, limit in told.tolerance.items()
        if told.images or graph == "decoder"
    }
    same = len(set(limits.values())) == 1
    each = ", ".join(f"{limit} ({graph})" for graph, limit in limits.items())
    yield f"tolerance: NMSE {limits['decoder'] if same else each}"
    told_of = (
        f"DIFFERENT: {', '.join(told.differences)}"
        if told.differences
        else "no difference beyond the tolerance"
    )
    yield from textwrap.wrap(f"result: {told_of}", COLUMNS, subsequent_indent=" " * 8)


def _number(nmse: float | None) -> str:
    return "none, as shapes differ" if nmse is None else f"{nmse:.1e}" if nmse else "0"
