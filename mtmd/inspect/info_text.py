"""Describes what `mtmd info` prints: what matters most first, then tables."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from mtmd.base.text import mib, plural
from mtmd.inspect.info import ModelInfo, Part, PictureCost, TokenFact
from mtmd.kernels.report.facts import GraphFacts
from mtmd.llm.sampling.options import ModelSampling

COLUMNS = 100
SHOWN = 4  # files and special tokens that are named


def render(info: ModelInfo) -> str:
    parts = (
        *(_head(info), _types(info), _adapters(info), _pictures(info)),
        *(_memory(info), _tokens(info)),
    )
    return "\n\n".join(
        "\n".join(line.rstrip() for line in part) for part in map(list, parts) if part
    )


def count(number: int) -> str:
    """1234 -> "1.23 K": three digits and a power of a thousand."""
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _head(info: ModelInfo) -> Iterator[str]:
    media = [*["images"] * bool(info.pictures), *["audio"] * bool(info.audio), "text"]
    what = " and ".join([", ".join(media[:-1]), media[-1]]) if len(media) > 1 else "text"
    yield (
        f"{info.model}: reads {what}, {count(info.parameters)} parameters, "
        f"{mib(info.stored_bytes)} as stored"
    )
    files = plural(len(info.files), "file")
    yield from _wrapped("format", f"{info.format}, {files}: {_some(info.files)}", 13)
    for part in info.parts:
        yield from _wrapped(
            f"{part.part} " if len(part.part) > 12 else part.part,
            f"{part.family}: {_sizes(part)}",
            13,
        )
    yield f"{'text':<12} vocabulary {info.vocabulary:,}, context {info.context_most:,} tokens"
    if info.pictures:
        yield f"{'a picture':<12} takes {_picture_tokens(info)}"
    if info.audio:
        each = (f"{cost.tokens:,} for {cost.seconds:g} s" for cost in info.audio)
        yield f"{'audio':<12} takes {', '.join(each)}, in tokens"
    peak = ", ".join(f"{mib(size)} on {space}" for space, size in info.peak_bytes.items())
    cache = f"{plural(info.sequences, 'sequence')} of {info.context:,} tokens"
    yield from _wrapped("memory", f"{peak} at most, predicted for {info.dtype} and {cache}", 13)
    yield f"{'device':<12} {info.device} ({info.device_name})"


def _picture_tokens(info: ModelInfo) -> str:
    if _alike(info.pictures):
        return f"{plural(info.most_tokens, 'token')}, whatever its size: {_tiles(info.pictures[0])}"
    return (
        f"{_range([p.tokens for p in info.pictures if not p.refused])} tokens "
        f"for the sizes below, at most {info.most_tokens:,}"
    )


def _sizes(part: Part) -> str:
    facts = {name.rpartition(".")[2]: number for name, number in reversed(part.facts.items())}
    text = [f"{facts.get('layers', facts.get('depth', 0))} layers", f"width {facts['width']:,}"]
    text += [f"FFN {facts['ffn']:,}"] if "ffn" in facts else []
    if "heads" in facts:
        head = facts.get("head", facts["width"] // facts["heads"])
        text.append(
            f"{facts['heads']} heads of {head}"
            + (
                f" on {facts['groups']}"
                if facts.get("groups", facts["heads"]) != facts["heads"]
                else ""
            )
        )
    kinds = {name: number for name, number in facts.items() if name.startswith("layers with ")}
    text += (
        [f"{number} {name.removeprefix('layers ')}" for name, number in kinds.items()]
        if len(kinds) > 1
        else []
    )
    return ", ".join(text)


def _types(info: ModelInfo) -> Iterator[str]:
    yield (
        f"{'weights':<12} {'type':<8} {'tensors':>7} {'parameters':>11} {'stored':>12} "
        f"{'in memory':>12}  used"
    )
    for row in info.types:
        used = (
            f"DEQUANTIZED to {row.used} at load"
            if row.dequantized
            else row.used
            if row.used == "as stored"
            else f"as {row.used}"
        )
        yield (
            f"  {row.part:<10} {row.kind:<8} {row.tensors:7,d} {count(row.parameters):>11} "
            f"{mib(row.stored_bytes):>12} "
            f"{mib(row.memory_bytes):>12}  {used}"
        )
    if info.dequantized:
        stored, memory = (
            sum(t.stored_bytes for t in info.dequantized),
            sum(t.memory_bytes for t in info.dequantized),
        )
        names = _some([t.name for t in info.dequantized])
        yield from _wrapped(
            "",
            f"dequantized as no kernel supports the stored form, {mib(stored)} become "
            f"{mib(memory)}: "
            f"{names}",
            2,
        )


def _adapters(info: ModelInfo) -> Iterator[str]:
    for adapter in info.adapters:
        yield from _wrapped("", str(adapter), 2)


def _pictures(info: ModelInfo) -> Iterator[str]:
    if not info.pictures or _alike(info.pictures):
        return
    yield f"{'picture':<14} {'tokens':>7}  tiles"
    for picture in info.pictures:
        width, height = picture.size
        yield (
            f"  {f'{width} x {height}':<12} "
            f"{f'{picture.tokens:,}' if not picture.refused else '-':>7}  {_tiles(picture)}"
        )


def _alike(pictures: Sequence[PictureCost]) -> bool:
    return len({(p.tokens, p.tile_sizes, p.refused) for p in pictures}) == 1


def _tiles(picture: PictureCost) -> str:
    if picture.refused:
        return f"refused: {picture.refused}"
    return " and ".join(f"{n} of {w} x {h}" for (w, h), n in Counter(picture.tile_sizes).items())


def _memory(info: ModelInfo) -> Iterator[str]:
    rows = [
        (f"  {_size(graph, info.context)}", space, graph)
        for graph in info.graphs
        for space in dict.fromkeys((*graph.weight_bytes, *graph.cache_bytes, *graph.compute_bytes))
    ]
    width = max(len(label) for label, *_ in rows)
    yield (
        f"{f'memory, context {info.context:,}':<{width}} {'':<10} {'weights':>12} {'cache':>12} "
        f"{'compute':>12}"
    )
    for label, space, graph in rows:
        yield f"{label:<{width}} {space:<10} {_bytes(graph, space)}"
    for space, size in info.peak_bytes.items():
        yield f"{'  predicted peak':<{width}} {space:<10} {mib(size):>38}"
    if info.cache_bytes:
        kinds = ", ".join(f"{kind} {mib(size)}" for kind, size in info.cache_bytes.items())
        yield f"  cache: {kinds}"


def _size(graph: GraphFacts, context: int) -> str:
    size = graph.size.removesuffix(f", context {context:,}")
    return f"{graph.graph}, {graph.label} ({size})"


def _bytes(graph: GraphFacts, space: str) -> str:
    cells = graph.weight_bytes, graph.cache_bytes, graph.compute_bytes
    return " ".join(f"{mib(cell[space]) if space in cell else '-':>12}" for cell in cells)


def _tokens(info: ModelInfo) -> Iterator[str]:
    if info.image_token:
        yield f"{'image token':<14} {_token(info.image_token)}"
    if info.audio_token:
        yield f"{'audio token':<14} {_token(info.audio_token)}"
    yield from _wrapped("stop tokens", ", ".join(map(_token, info.stop_tokens)), 15)
    named = [f"{t.name.removesuffix('_token')} {_token(t)}" for t in info.tokens]
    yield from _wrapped("special tokens", ", ".join(named) or "none", 15)
    yield f"{'chat template':<14} {info.chat_template}"
    yield from _sampling(info.sampling)
    if info.tasks:
        yield from _wrapped("tasks", f"{', '.join(info.tasks)} (--task)", 15)
    for note in info.notes:
        yield from _wrapped("note", note, 15)


def _sampling(sampling: ModelSampling) -> Iterator[str]:
    """Yield what the model's files recommend, and which of that is not applied."""
    values = [f"{name} {value:g}" for name, value in sampling.values.items()]
    if sampling.values and "temperature" not in sampling.values:
        values = ["the most probable token", *values]
    text = f"{', '.join(values)} ({sampling.source})" if values else ""
    nothing = "the most probable token; the files recommend no sampling"
    yield from _wrapped("sampling", text or nothing, 15)
    if sampling.unused:
        yield from _wrapped("  not applied", ", ".join(sampling.unused), 15)
    if sampling.length:
        text = f"{', '.join(sampling.length)}, which is only shown: max_tokens decides"
        yield from _wrapped("  length", text, 15)


def _token(token: TokenFact) -> str:
    return f"{token.text!r} ({token.id})"


def _wrapped(label: str, text: str, indent: int) -> list[str]:
    """Return it in lines of the terminal's width, `text` beginning at the column `indent`."""
    return textwrap.wrap(
        text, COLUMNS, initial_indent=f"{label:<{indent}}", subsequent_indent=" " * indent
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _range(numbers: Iterable[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
