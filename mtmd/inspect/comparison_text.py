"""Describes what `mtmd compare` prints."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator

from mtmd.base.text import plural
from mtmd.inspect.comparison import (
    SAVED,
    ImageDifference,
    ModelComparison,
    NodeDifference,
    SideFacts,
)

COLUMNS = 100
LABEL = 11


def render(reported: ModelComparison) -> str:
    return "\n".join(
        line.rstrip()
        for line in (
            *_sides(reported),
            "",
            *_request(reported),
            *_nodes(reported),
            "",
            *_verdict(reported),
        )
    )


def _sides(reported: ModelComparison) -> Iterator[str]:
    for label, side in (("A", reported.a), ("B", reported.b)):
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


def _request(reported: ModelComparison) -> Iterator[str]:
    prompt, logits = reported.prompt, reported.logits
    if prompt.first is None:
        yield from _row("prompt", f"{plural(prompt.tokens_a, 'token')}, the same ids")
    else:
        at, *ids = prompt.first
        a, b = ("no more tokens" if i is None else f"id {i}" for i in ids)
        yield from _row(
            "prompt",
            f"{plural(prompt.tokens_a, 'token')} in A, {prompt.tokens_b} in B; DIFFERENT at token "
            f"{at}: {a} in A, {b} in B",
        )
    for number, image in enumerate(reported.images, 1):
        yield from _row(f"image {number}", _image(image))
    same = logits.top_a == logits.top_b
    top = (
        f"the same most probable token, {logits.top_a}"
        if same
        else f"most probable token {logits.top_a} in A, {logits.top_b} in B"
    )
    yield from _row("logits", f"NMSE {_number(logits.nmse)}; {top}")
    steps = (
        f"; logits NMSE {_number(logits.worst_nmse)} at worst in {plural(logits.steps, 'step')}"
        if logits.steps > 1
        else ""
    )
    yield from _row(
        "greedy", f"{reported.agreed} of {plural(len(reported.tokens_a), 'token')} agree{steps}"
    )
    if reported.tokens_a != reported.tokens_b:
        yield from (
            f"{'':<{LABEL}}{label}: {text!r:.{COLUMNS - LABEL - 3}}"
            for label, text in zip("AB", reported.texts, strict=True)
        )


def _row(label: str, text: str) -> list[str]:
    return textwrap.wrap(
        text, COLUMNS, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL
    )


def _image(image: ImageDifference) -> str:
    tiles = _tiles(image.tiles_a)
    if image.tiles_a != image.tiles_b or image.tokens_a != image.tokens_b:
        return (
            f"DIFFERENT: {tiles}, {plural(image.tokens_a, 'token')} in A; {_tiles(image.tiles_b)}, "
            f"{plural(image.tokens_b, 'token')} in B"
        )
    return (
        f"{tiles}, {plural(image.tokens_a, 'token')}; NMSE of pixels "
        f"{_number(image.pixel_nmse)}, of embeddings {_number(image.embedding_nmse)}"
    )


def _tiles(sizes: tuple[tuple[int, int], ...]) -> str:
    return " and ".join(f"{plural(n, 'tile')} of {w} x {h}" for (w, h), n in Counter(sizes).items())


def _nodes(reported: ModelComparison) -> Iterator[str]:
    part = (
        f", {reported.in_part} of them by {SAVED:,} values, evenly spread"
        if reported.in_part
        else ""
    )
    yield from _row("nodes", f"{reported.compared} compared{part}")
    for label, side in (("A", reported.only_a), ("B", reported.only_b)):
        if side.first:
            graph, name, op = side.first
            yield from _row("", f"{side.count} only in {label}, first {graph} {name} ({op})")
    if reported.largest and reported.largest.nmse == 0:
        yield from _row("", "every value the same")
    elif reported.largest and (
        reported.first is None or reported.first.nmse is not None
    ):  # after other shapes, all else differs too
        yield from _row(
            "",
            f"largest NMSE {_number(reported.largest.nmse)} at {reported.largest.graph} "
            f"{reported.largest.name} ({reported.largest.op})",
        )
    if reported.first:
        yield from _first(reported.first)


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


def _verdict(reported: ModelComparison) -> Iterator[str]:
    limits = {
        graph: f"{limit:.1e}"
        for graph, limit in reported.tolerance.items()
        if reported.images or graph == "decoder"
    }
    same = len(set(limits.values())) == 1
    each = ", ".join(f"{limit} ({graph})" for graph, limit in limits.items())
    yield f"tolerance: NMSE {limits['decoder'] if same else each}"
    reported_of = (
        f"DIFFERENT: {', '.join(reported.differences)}"
        if reported.differences
        else "no difference beyond the tolerance"
    )
    yield from textwrap.wrap(f"result: {reported_of}", COLUMNS, subsequent_indent=" " * 8)


def _number(nmse: float | None) -> str:
    return "none, as shapes differ" if nmse is None else f"{nmse:.1e}" if nmse else "0"
