"""A prediction as text of 80 columns: what a buyer asks first, then what it rests on; and several
cards beside each other.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from mtmd.base.text import plural
from mtmd.inspect.prediction import GraphOps, Length, Picture, Prediction
from mtmd.inspect.ranks_text import render_ranks
from mtmd.kernels.estimate.roofline import UNCONFIRMED, Estimate
from mtmd.kernels.report.facts import CompiledKernel
from mtmd.kernels.report.report_text import kv_text
from mtmd.loaded.fitting.needed_memory import MAX_ANSWERS

WIDTH = 80
GIB = 1 << 30
NOT_RUN = f"PREDICTED, {UNCONFIRMED.upper()}: memory from the plans, times estimated."
SHOWN = 6  # ops of one graph, those that take most


def render_prediction(report: Prediction) -> str:
    parts = (_head, _fit, _speed, _ranks, _memory, _acceleration, _ops, _kernels, _notes)
    reported = ([*part(report)] for part in parts)
    lines = [line.rstrip() for part in reported if part for line in (*part, "")]
    return "\n".join(lines).rstrip("\n")


def _head(report: Prediction) -> Iterator[str]:
    card = report.card
    assert card is not None
    yield from _wrapped(
        f"{report.model} on {card.name}: {card.title}, {card.target}, {report.dtype}"
    )
    if report.kv is not None and report.kv.type != report.dtype:
        yield from _wrapped(kv_text(report.kv, report.dtype))
    if card.gb_per_s is not None and card.tflops_16 is not None:
        yield from _wrapped(
            f"{card.multiprocessors} multiprocessors, {_gib(card.memory_bytes)} GiB, "
            f"{card.gb_per_s:,.0f} GB/s, {card.tflops_16:,.0f} TFLOP/s bf16, "
            f"{card.tflops_32:,.0f} fp32 ({card.source})"
        )
    yield NOT_RUN
    yield from _result(report)


def _result(report: Prediction) -> Iterator[str]:
    runs = "everything" if report.fully_accelerated else "not all of it"
    verdict = f"{runs} would run on {report.device} as intended"
    if report.fits(report.needed_bytes) is not False:
        yield from _wrapped(f"result: {verdict}")
        return
    yield from _wrapped(f"result: DOES NOT FIT ({verdict})")
    for way in _ways_out(report):
        yield from _wrapped(f"  to do: {way}")


def _ways_out(report: Prediction) -> Iterator[str]:
    if report.longest_context:
        longest = report.longest_context
        yield f"--context {longest}: it fits with {longest:,} tokens{_without(report)}"
    if report.most_answers:
        yield f"--parallel {report.most_answers}: so many answers at once fit"
    if not report.longest_context and not report.most_answers:
        yield "--weights Q4_K_M: fewer bits a weight, if they are not so few yet"
    yield "`mtmd fit` shows other ways: several cards, or the CPU's memory as well"


def _fit(report: Prediction) -> Iterator[str]:
    requested, needed = report.requested, report.needed_bytes
    what = f"{plural(report.sequences, 'answer')} at once of {requested.context:,} tokens"
    if report.usable_bytes is None:
        yield from _wrapped(f"memory: {_gib(needed)} GiB for {what} (give --memory, or a card)")
        return
    verdict = "FITS" if report.fits(needed) else "DOES NOT FIT"
    yield from _wrapped(
        f"{verdict}: {_gib(needed)} of {_gib(report.usable_bytes)} GiB usable, for {what}"
        + (" and any picture of those below" if report.pictures else "")
        + (" that they hold" if _too_long(report, requested.context) else "")
    )
    yield from _wrapped(f"  longest context that fits: {_longest(report)}")
    more = " or more" if report.most_answers == MAX_ANSWERS else ""
    maximum = f"{report.most_answers:,}{more}" if report.most_answers else "none"
    yield f"  maximum concurrent answers of {requested.context:,} tokens: {maximum}"
    if report.pictures:
        yield from _wrapped(
            f"  largest picture at {requested.context:,} tokens: {_largest(report)}"
        )


def _longest(report: Prediction) -> str:
    longest = report.longest_context
    if not longest:
        return "none"
    limit = ", the model's limit" if longest == report.context_most else ""
    return f"{longest:,} tokens{limit}{_without(report)}"


def _without(report: Prediction) -> str:
    longest, pictures = report.longest_context, report.pictures
    stored = longest is None or any(p.is_shared_by(longest) for p in pictures)
    return ", without a picture" if pictures and not stored else ""


def _largest(report: Prediction) -> str:
    fitting = [
        picture
        for picture, needed in zip(report.pictures, report.requested.picture_bytes, strict=True)
        if report.fits(needed)
    ]
    if not fitting:
        return "none"
    last = fitting[-1]
    return f"{_size(last)} and more" if last is report.pictures[-1] else _size(last)


def _speed(report: Prediction) -> Iterator[str]:
    card = report.card
    assert card is not None
    if card.gb_per_s is None:
        yield from _wrapped(f"speed: {card.name} is many cards; name one (--target list)")
        return
    if all(length.decode is None for length in report.lengths):
        yield "speed: not estimated, as some of the model does not run on the card"
        return
    columns = f"{'middle':>8}{'slow to fast':>19}{'':4}{'bound':<10}{'launches':>8}"
    yield f"{f'speed, {UNCONFIRMED}':<31}{columns}"
    for pictures in _alike(report.pictures):
        first, last = pictures[0], pictures[-1]
        if first.encode is not None:
            span = _short(first) if first is last else f"{_short(first)} to {_short(last)}"
            needed = dict(zip(report.pictures, report.requested.picture_bytes, strict=True))[last]
            what = f"encode {span}, {first.tokens:,} tok{_star(report, needed)}"
            if len(what) > 28:
                yield f"  {what}"
                what = ""
            yield _row(what, first.encode, "ms", 0)
        elif first.refused:
            yield from _wrapped(f"  encode {_short(first)}: refused, {first.refused}")
    for length in report.lengths:
        if not length.prefill or not length.decode or not length.decode_all:
            continue
        at, star = f"at {length.context:,}", _star(report, length.bytes)
        yield _row(f"prefill {at}{star}", length.prefill, "tok/s", length.prefill_tokens)
        yield _row(f"decode {at}{star}", length.decode, "tok/s", 1)
        if report.sequences > 1:
            many = f"decode {at} x {report.sequences}{star}"
            yield _row(many, length.decode_all, "tok/s", report.sequences)
    yield from _wrapped(
        f"  'at': when a sequence is so long; prefill by {report.requested.prefill_tokens:,} "
        f"tokens; 'x': of {plural(report.sequences, 'answer')} together"
    )
    if any(report.fits(b) is False for row in report.lengths for b in _all(row)):
        yield "  * does not fit; times as if it did"


def _star(report: Prediction, needed: int | None) -> str:
    return " *" if report.fits(needed) is False else ""


def _ranks(report: Prediction) -> Iterator[str]:
    if report.ranks is not None:
        yield from render_ranks(report.ranks, report.links, _row)


def _alike(pictures: Sequence[Picture]) -> list[list[Picture]]:
    """Neighbours that become the same tiles together."""
    groups: list[list[Picture]] = []
    for picture in pictures:
        last = groups[-1][-1] if groups else None
        if last and (last.tokens, last.encode, last.refused) == (
            picture.tokens,
            picture.encode,
            picture.refused,
        ):
            groups[-1].append(picture)
        else:
            groups.append([picture])
    return groups


def _row(what: str, e: Estimate, unit: str, tokens: int) -> str:
    """Milliseconds, or tokens a second, of which more is fast."""
    if unit == "ms":
        middle, slow, fast = e.ms, e.slow_ms, e.fast_ms
    else:
        middle, slow, fast = (tokens / ms * 1e3 for ms in (e.ms, e.slow_ms, e.fast_ms))
    spread = f"{_digits(slow)} to {_digits(fast)}"
    return f"  {what:<28}{_digits(middle):>9} {unit:<5} {spread:>17} {e.bound:<9}{e.launches:>7,}"


def _memory(report: Prediction) -> Iterator[str]:
    usable = report.usable_bytes
    against = "" if usable is None else f" of {_gib(usable)} usable"
    yield (
        f"memory, GiB{against}: weights {_gib(report.weight_bytes)}, cache of "
        f"{plural(report.sequences, 'answer')}, compute"
    )
    sizes = [_short(picture) for picture in report.pictures]
    yield f"  {'context':>9}{'cache':>9}{'no image':>10}" + "".join(f"{s:>10}" for s in sizes)
    for length in report.lengths:
        cells = (length.bytes, *length.picture_bytes)
        text = "".join(f"{_cell(report, needed):>10}" for needed in cells)
        yield f"  {length.context:>9,}{_gib(length.cache_bytes):>9}{text}"
    if any(report.fits(b) is False for row in report.lengths for b in _all(row)):
        yield "  * does not fit"
    if any(_too_long(report, length.context) for length in report.lengths):
        yield "  - the picture has more tokens than the context"


def _too_long(report: Prediction, context: int) -> bool:
    """Return whether there is a picture that is taken, but not by so short a sequence."""
    return any(p.refused is None and not p.is_shared_by(context) for p in report.pictures)


def _all(length: Length) -> tuple[int | None, ...]:
    return (length.bytes, *length.picture_bytes)


def _cell(report: Prediction, needed: int | None) -> str:
    if needed is None:
        return "-"
    return _gib(needed) + ("*" if report.fits(needed) is False else " ")


def _acceleration(report: Prediction) -> Iterator[str]:
    for flash in report.flash:
        nodes = plural(flash.nodes, "node")
        yield f"flash attention, {flash.graph}: {flash.state.upper()}, {nodes}"
    if not report.refused:
        yield f"every operation is supported by {report.device}"
    for r in report.refused:
        shape = next((f"{t.dtype} {list(t.shape)}" for t in r.tensors if t.role == "dst"), "")
        yield from _wrapped(
            f"REFUSED: {r.count} x {r.op} of the {r.graph}, {shape}, first {r.name}: {r.reason}; "
            f"runs on {r.runs_on}"
        )
    for tensor in report.dequantized[:1]:
        size = sum(t.memory_bytes for t in report.dequantized)
        yield from _wrapped(
            f"WARNING: {plural(len(report.dequantized), 'tensor')} kept dequantized, "
            f"{_gib(size)} GiB, as no kernel supports them as stored: first {tensor.name}"
        )


def _ops(report: Prediction) -> Iterator[str]:
    for graph in report.work:
        if graph.graph in ("encoder, largest",) and _same_ops(report.work, graph):
            continue
        facts = next((g for g in report.graphs if f"{g.graph}, {g.label}" == graph.graph), None)
        size = f" ({facts.size})" if facts else ""
        yield from _wrapped(
            f"{graph.graph}{size}: {graph.launches:,} launches, times {UNCONFIRMED}"
        )
        yield f"  {'op':<16}{'kernel':<27}{'nodes':>6}{'launches':>9}{'ms':>9}  bound"
        for op in graph.ops[:SHOWN]:
            ms = _digits(op.ms) if op.ms else "-"
            yield (
                f"  {op.op:<16}{op.kernel:<27}{op.nodes:>6,}{op.launches:>9,}{ms:>9}  {op.bound}"
            )
        if rest := graph.ops[SHOWN:]:
            total = sum(op.ms for op in rest)
            yield (
                f"  {f'{len(rest)} others':<43}{sum(o.nodes for o in rest):>6,}"
                f"{sum(o.launches for o in rest):>9,}{_digits(total) if total else '-':>9}"
            )


def _same_ops(work: Sequence[GraphOps], graph: GraphOps) -> bool:
    """Return whether it launches what the warm-up size does, only larger."""
    first = next((w for w in work if w.graph == "encoder, warm-up"), None)
    return first is not None and first.launches == graph.launches


def _kernels(report: Prediction) -> Iterator[str]:
    if report.not_compiled:
        yield from _wrapped(f"kernels not compiled: {report.not_compiled}")
        return
    alike: dict[tuple[object, ...], list[CompiledKernel]] = {}
    for kernel in report.compiled:
        alike.setdefault(_resources(kernel), []).append(kernel)
    target = report.device
    yield (
        f"{f'compiled for {target}':<27}{'registers':>9}{'shared KiB':>14}{'spilled':>9}"
        f"{'at once':>9}  matrix"
    )
    for kernels in alike.values():
        k = kernels[0]
        head = f", head {k.head}" if k.head else ""
        spilled = f"{k.spill_bytes} B" if k.spill_bytes else "no"
        shared = f"{k.shared_bytes / 1024:.1f} of {k.shared_limit // 1024}"
        yield (
            f"  {k.kernel + head:<25}{k.registers:>9}{shared:>14}{spilled:>9}"
            f"{k.programs_at_once:>9}  {k.instruction}"
        )
        for graph in dict.fromkeys(kernel.graph for kernel in kernels):
            nodes = sum(kernel.nodes for kernel in kernels if kernel.graph == graph)
            yield f"    {graph}: {plural(nodes, 'node')}"
    if any(k.programs_at_once == 0 for k in report.compiled):
        yield "WARNING: a kernel with 0 at once needs more than a multiprocessor has"


def _resources(k: CompiledKernel) -> tuple[object, ...]:
    return k.kernel, k.head, k.registers, k.shared_bytes, k.spill_bytes, k.instruction


def _notes(_: Prediction) -> Iterator[str]:
    yield from _wrapped(
        "Times are the larger of the device's (bytes, FLOPs and launches of the plan over the "
        "published rates) and the host's (one launch after another), with parts of those rates "
        "that are assumptions: the range is theirs. 'at once' are programs on a multiprocessor. "
        "The formula and its factors: docs/gpu.md."
    )


def render_comparison(reports: Sequence[Prediction]) -> str:
    """Cards beside each other, one a row, at the context that was asked for and the picture that
    most cards are asked about: the last but one, 1920 x 1080.
    """
    first = reports[0]
    context = first.context
    picture = first.pictures[-2] if len(first.pictures) > 1 else None
    lines = [
        *_wrapped(
            f"{first.model}, {first.dtype}, {plural(first.sequences, 'answer')} at once of "
            f"{context:,} tokens" + (f", a picture of {_size(picture)} pixels" if picture else "")
        ),
        NOT_RUN,
        "",
        f"{'':<10}{'needed of':>15} {'longest':>9}{'encode':>8}{'prefill':>8}{'decode':>7}"
        f"{f'x {first.sequences}':>8}",
        f"{'card':<10}{'usable GiB':>15} {'context':>9}{'ms':>8}{'tok/s':>8}{'tok/s':>7}"
        f"{'tok/s':>8}  bound",
    ]
    lines += [_compared(report, picture) for report in reports]
    if any(report.fits(report.needed_bytes) is False for report in reports):
        lines.append("* does not fit; times as if it did")
    lines += [
        "",
        *_wrapped(
            "Middle estimates; the range and basis of each is in the report of "
            "one card. 'bound' is what limits decode. Formula and factors: docs/gpu.md."
        ),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _compared(report: Prediction, picture: Picture | None) -> str:
    card, at = report.card, report.requested
    assert card is not None
    usable = "?" if report.usable_bytes is None else _gib(report.usable_bytes)
    star = "*" if report.fits(report.needed_bytes) is False else " "
    longest = "?" if report.longest_context is None else f"{report.longest_context:,}"
    mine = next((p for p in report.pictures if picture and p.size == picture.size), None)
    encode = _digits(mine.encode.ms) if mine and mine.encode else "-"
    rates = [
        _digits(tokens / e.ms * 1e3) if e else "-"
        for e, tokens in (
            (at.prefill, at.prefill_tokens),
            (at.decode, 1),
            (at.decode_all, report.sequences),
        )
    ]
    needed = f"{_gib(report.needed_bytes)} of {usable}{star}"
    bound = at.decode.bound if at.decode else ""
    return (
        f"{card.name:<10}{needed:>16}{longest:>9}{encode:>8}{rates[0]:>8}{rates[1]:>7}"
        f"{rates[2]:>8}  {bound}"
    )


def _digits(value: float) -> str:
    """Two that count: more would be a promise."""
    if value >= 99_500:
        return f"{float(f'{value:.2g}') / 1000:,.0f}k"
    if value >= 9.95:
        rounded = float(f"{value:.2g}")
        return f"{rounded:,.0f}"
    return f"{value:.2g}" if value >= 0.01 else "0.01"


def _gib(size: int | None) -> str:
    return "?" if size is None else f"{size / GIB:.1f}" if size >= GIB / 10 else f"{size / GIB:.2f}"


def _size(picture: Picture) -> str:
    return f"{picture.size[0]} x {picture.size[1]}"


def _short(picture: Picture) -> str:
    return f"{picture.size[0]}x{picture.size[1]}"


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent + "  ", break_on_hyphens=False)
