"""The warm-up report as text: the result first, then warnings, hard to miss, memory, time."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from mtmd.base.text import mib, plural
from mtmd.kernels.report.facts import (
    Check,
    DequantizedTensor,
    FlashFacts,
    GraphFacts,
    KVFacts,
    RefusedOp,
    SavedWholeFacts,
    WarmupFacts,
)
from mtmd.kernels.report.why_slow import hindrances, reached

RULE = "*" * 100
SHOWN = 12  # copies of one graph that are listed by name


NARROW = 60  # columns, below which the tables of times have fewer of them
HANG = 4  # blanks before what goes on from the line above


def render(report: WarmupFacts, columns: int | None = None) -> str:
    """Render in lines of `columns` characters at most, None for as long as they are."""
    wide = columns is None or columns >= NARROW
    parts = (
        *(
            _head,
            _result,
            _kv,
            _activations,
            _fit,
            _layers,
            _flash,
            _vision_attention,
            _preprocessing,
        ),
        *(_speculation, _adapters, _warnings, _untried, _ranks, _programs, _dequantized, _graphs),
    )
    lines = [line.rstrip() for part in parts for line in part(report)]
    lines += [line.rstrip() for line in _checks(report, wide)]
    while not lines[-1]:
        lines.pop()
    return "\n".join(lines if columns is None else _fitted(lines, columns))


def _fitted(lines: list[str], columns: int) -> Iterator[str]:
    for line in lines:
        if line == RULE:
            yield RULE[:columns]
        elif len(line) <= columns:
            yield line
        else:
            indent = len(line) - len(line.lstrip())
            yield from textwrap.wrap(
                line,
                columns,
                subsequent_indent=" " * min(indent + HANG, columns // 3),
                break_on_hyphens=False,
            )


def _head(report: WarmupFacts) -> Iterator[str]:
    yield f"mtmd warm-up: {report.model} on {report.device} ({report.device_name}), {report.dtype}"
    if report.weights:
        yield report.weights
    yield ""


def _kv(report: WarmupFacts) -> Iterator[str]:
    if report.kv is not None:
        yield kv_text(report.kv, report.dtype)
        yield ""


def _activations(report: WarmupFacts) -> Iterator[str]:
    for facts in report.activations:
        fewer = f", {facts.in_7_bits} of them in 7 bits" if facts.in_7_bits else ""
        weights = f"; plain weights quantized to {facts.quantized}" if facts.quantized else ""
        yield (
            f"activations: {facts.type} in {facts.products} of the {facts.graph}'s "
            f"{facts.all_products} products with weights, where they have more than 24 rows{fewer}"
            f"{weights}"
        )
        if facts.in_16_bits:
            yield (
                f"activations: 16 bits in {facts.in_16_bits} of the {facts.graph}'s products, "
                "whose weights have 8 bits: this CPU would take 7"
            )
    if report.could_round:
        yield (
            "activations: not rounded; --activations int8 would read prompts faster and less "
            f"exactly, in {plural(report.could_round, 'product')} of the decoder"
        )
    if report.activations or report.could_round:
        yield ""


def kv_text(kv: KVFacts, dtype: str) -> str:
    """Keys and values in words: `keys and values: q8_0, 12 KiB a token (bf16: 22 KiB), ...`."""
    computed = "" if kv.type == dtype else f" ({dtype}: {kv.computed_bytes / 1024:,.1f} KiB)"
    states = f"; recurrent states {mib(kv.recurrent_bytes)}, as they are"
    return (
        f"keys and values: {kv.type}, {kv.token_bytes / 1024:,.1f} KiB a token{computed}, "
        f"{mib(kv.bytes)} of a full cache{states if kv.recurrent_bytes else ''}"
        f"{f'; WARNING: {kv.warning}' if kv.warning else ''}"
    )


def _flash(report: WarmupFacts) -> Iterator[str]:
    for flash in report.flash:
        yield f"flash attention, {flash.graph}: {flash.state.upper()} ({_flash_reason(flash)})"
    yield ""


def _vision_attention(report: WarmupFacts) -> Iterator[str]:
    """The kernel of each class of shapes, and the times and reasons that speak for it."""
    facts = report.vision_attention
    if facts is None:
        return
    machine = ", ".join(f"{name} {value}" for name, value in facts.machine.items())
    yield f"attention of the encoder: requested {facts.setting} ({machine})"
    for one in facts.found.classes:
        when = "measured before" if one.kept else "measured now"
        yield f"  {one.shape}: {one.chosen} ({when}, {one.measured.node})"
        timed = [t for t in one.measured.trials if t.ms is not None]
        for trial in sorted(timed, key=lambda t: t.ms or 0.0):
            yield f"    {trial.name:<16} {trial.ms:9.3f} ms"
        for trial in one.measured.trials:
            if trial.refused is not None:
                yield f"    {trial.name:<16} refused: {trial.refused}"
    for name, reason in facts.left_out:
        yield f"  {name} is left out: {reason}"
    for reason, count in facts.found.unasked:
        nodes = plural(count, "node")
        yield f"  {nodes} by triton without tuning, not measured: {reason}"
    if facts.found.classes:
        yield f"  kept in {facts.file}" if facts.file else "  not saved: no folder is writable"
    yield ""


def _preprocessing(report: WarmupFacts) -> Iterator[str]:
    facts = report.preprocessing
    if facts is None:
        return
    if facts.why_host is None:
        yield f"preprocessing: on {facts.device} (requested: {facts.setting})"
    else:
        yield f"preprocessing: on the HOST (requested: {facts.setting}; {facts.why_host})"
    if facts.size is not None:
        resized = (
            f"resized there {facts.resized_there} times"
            if facts.resized_there
            else "resized on the host, normalised there"
        )
        yield (
            f"  {facts.size[0]} x {facts.size[1]} pixels: {facts.device_ms:.1f} "
            f"ms, {resized}, only on the host {facts.host_ms:.1f} ms; equal to "
            "the bit"
        )
    yield from (f"  WARNING: {note}" for note in facts.notes)
    yield ""


def _speculation(report: WarmupFacts) -> Iterator[str]:
    facts = report.speculation
    if facts is None:
        return
    if facts.refused:
        yield f"speculative decoding: OFF (requested: {facts.setting}; {facts.refused})"
    elif facts.costs:
        rows = ", ".join(str(n) for n, _ in facts.costs)
        times = ", ".join(f"{cost:.2f}" for _, cost in facts.costs)
        yield (
            f"speculative decoding: {facts.setting} (steps of {rows} rows take {times} times as "
            "long as of one)"
        )
    else:
        yield f"speculative decoding: {facts.setting}"
    yield ""


def _adapters(report: WarmupFacts) -> Iterator[str]:
    if report.adapters:
        yield from map(str, report.adapters)
        yield ""


def _flash_reason(flash: FlashFacts) -> str:
    setting = f"requested: {flash.setting}"
    if not flash.nodes:
        return f"{setting}; the graph has no attention"
    if flash.on_fallback:
        return f"{setting}; {len(flash.on_fallback)} of {flash.nodes} nodes run on another backend"
    if flash.rebuilt:
        return (
            f"{setting}; {len(flash.rebuilt)} of {flash.nodes} nodes were refused and rebuilt as "
            "explicit attention"
        )
    return (
        f"{setting}; {plural(flash.nodes, 'node')}"
        if flash.setting == "off"
        else f"{setting}; all {plural(flash.nodes, 'node')} supported"
    )


def _warnings(report: WarmupFacts) -> Iterator[str]:
    if not report.refused:
        yield f"every operation is supported by {', '.join(report.devices)}"
        yield ""
        return
    attention = [r for r in report.refused if r.op == "attention"]
    for refused in attention:
        yield RULE
        if "explicit" in refused.runs_on:
            yield (
                f"WARNING: flash attention is not supported by {refused.backend} for "
                f"{_nodes(refused)}; memory use will increase"
            )
        else:
            yield (
                f"WARNING: flash attention of {_nodes(refused)} is not supported by "
                f"{refused.backend}; "
                f"it runs on {refused.runs_on}, slower"
            )
        yield f"  reason: {refused.reason}"
        yield "  op params:"
        for tensor in refused.tensors:
            yield (
                f"    {tensor.role:<6} type = {tensor.dtype}, shape = {list(tensor.shape)}, "
                f"strides = {list(tensor.strides)}"
            )
        yield RULE
        yield ""
    yield RULE
    total = sum(r.count for r in report.refused)
    yield (
        f"WARNING: {plural(total, 'node')} not supported by "
        f"{report.refused[0].backend}; each is listed here with its reason"
    )
    for r in report.refused:
        shape = next((f"{t.dtype} {list(t.shape)}" for t in r.tensors if t.role == "dst"), "")
        yield f"  {r.count:4d} x {r.op:<12} {shape:<30} {r.name}"
        yield f"         {r.reason}; runs on {r.runs_on}"
    yield RULE
    yield ""


def _untried(report: WarmupFacts) -> Iterator[str]:
    if report.lacks:
        yield (
            f"WARNING: {report.device} runs by torch's own operators, launched one by one, and "
            "quantized weights take the memory of plain ones"
        )
        yield f"  {report.lacks}"
        yield ""
    if report.untried:
        ops = ", ".join(f"{op} ({mib(size)})" for op, size in report.untried)
        yield f"not tried on {report.device}, as operands are too large for that: {ops}"
        yield ""


def _fit(report: WarmupFacts) -> Iterator[str]:
    """Yield what was looked at before the model was laid out so."""
    if report.fit is None:
        return
    yield f"fit: {report.fit.chosen}"
    if report.fit.one_cache:
        spaces = ", ".join(report.fit.one_cache)
        yield f"  of caches on {spaces} that of one answer is counted, others wait for room"
    for layout in report.fit.layouts:
        if layout.reason is not None:
            yield f"  refused: {layout.name}: {layout.reason}"
            continue
        lies = "chosen" if layout.name == report.fit.chosen else "refused"
        yield f"  {lies}: {layout.name}"
        for memory in layout.memories:
            there = "unknown" if memory.available is None else mib(memory.available)
            short = "" if memory.fits else ": does not fit"
            yield (
                f"    {memory.space:<8} needs {mib(memory.needed)} of {there}{short} (weights "
                f"{mib(memory.weights)}, encoder {mib(memory.encoder)}, cache "
                f"{mib(memory.cache)}, compute {mib(memory.compute)})"
            )
    yield ""


def _layers(report: WarmupFacts) -> Iterator[str]:
    """Yield what each of several devices has."""
    if not report.layers:
        return
    yield "layers over devices"
    yield from (f"  {part}" for part in report.layers)
    yield ""


def _programs(report: WarmupFacts) -> Iterator[str]:
    facts = report.programs
    if facts is None:
        return
    yield (
        f"GPU programs for {facts.target}: {facts.needed} foreseen, {facts.compiled} compiled now"
        + (f" ({facts.compile_ms / 1e3:.1f} s of compiling)" if facts.compiled else "")
    )
    if (given := facts.given) is not None:
        yield f"    {given.used} of them among the {given.programs} of {given.folder}"
        if not given.used:
            yield (
                f"WARNING: {given.folder}: of its {given.programs} programs, of {given.model}, "
                "none is of use to this model"
            )
    yield ""


def _ranks(report: WarmupFacts) -> Iterator[str]:
    """Yield what the ranks of a model share, and what they do not."""
    facts = report.ranks
    if facts is None:
        return
    total = sum(r.share for r in facts.ranks)
    yield f"tensor parallelism: {len(facts.ranks)} ranks"
    for rank in facts.ranks:
        yield (
            f"  rank {rank.rank}, {rank.share / total:4.0%}: weights {mib(rank.weight_bytes):>11}, "
            f"cache {mib(rank.cache_bytes):>11}, compute {mib(rank.compute_bytes):>11}"
        )
    for c in facts.collectives:
        yield f"  {c.graph}, {c.label}: {c.count} {c.op} of {mib(c.bytes)} together"
    whole = [k for k in facts.kept_whole if not k.refused]
    for saved in whole:
        yield f"  whole on every rank: {_names(saved)} ({saved.reason})"
    yield ""
    if not facts.refused:
        return
    yield RULE
    count = sum(len(k.names) for k in facts.refused)
    yield (
        f"WARNING: {plural(count, 'projection')} cannot be shared out; every rank "
        "has all of them, and computes them"
    )
    for saved in facts.refused:
        yield f"  {_names(saved)}, {saved.graph}"
        yield f"         {saved.reason}"
    yield RULE
    yield ""


def _names(saved: SavedWholeFacts) -> str:
    more = len(saved.names) - 1
    return f"{saved.names[0]} and {more} more" if more else saved.names[0]


def _dequantized(report: WarmupFacts) -> Iterator[str]:
    """Per type, most memory first."""
    if not report.dequantized:
        return
    by_kind: dict[str, list[DequantizedTensor]] = {}
    for tensor in report.dequantized:
        by_kind.setdefault(tensor.kind, []).append(tensor)
    yield RULE
    count = len(report.dequantized)
    what = "1 tensor is dequantized" if count == 1 else f"{count} tensors are dequantized"
    yield f"WARNING: {what} at load, as no kernel supports the stored form; memory use increases"
    for kind, tensors in sorted(
        by_kind.items(), key=lambda item: -sum(t.memory_bytes for t in item[1])
    ):
        stored, memory = sum(t.stored_bytes for t in tensors), sum(t.memory_bytes for t in tensors)
        yield (
            f"  {len(tensors):4d} x {kind:<8} {mib(stored):>11} stored, {mib(memory):>11} in "
            f"memory   {tensors[0].name}"
        )
    yield RULE
    yield ""


def _nodes(refused: RefusedOp) -> str:
    return refused.name if refused.count == 1 else f"{refused.count} nodes, first {refused.name}"


def _graphs(report: WarmupFacts) -> Iterator[str]:
    for facts in report.graphs:
        backends = ", ".join(f"{name} {count}" for name, count in facts.ops_by_backend.items())
        yield (
            f"{facts.graph}, {facts.label} ({facts.size}): graph splits = {facts.splits}, nodes = "
            f"{facts.nodes} ({backends}), "
            f"copies = {len(facts.copies)}, {facts.gflop:.3g} GFLOP"
        )
        yield from _memory(facts)
        yield from _native(facts)
        if facts.kernels:
            ways = ", ".join(f"{count} x {op} as {way}" for op, way, count in facts.kernels)
            yield f"    kernels: {ways}"
        for count, block, rows in facts.row_blocks:
            yield (
                f"    row blocks: {plural(count, 'chain')} of nodes, {block} of {rows} rows at a "
                "time"
            )
        for copy in facts.copies[:SHOWN]:
            yield f"    copy {copy.name}: {copy.source} -> {copy.destination}, {mib(copy.bytes)}"
        if len(facts.copies) > SHOWN:
            yield (
                f"    and {len(facts.copies) - SHOWN} more copies, "
                f"{mib(sum(c.bytes for c in facts.copies[SHOWN:]))}"
            )
    yield ""


def _memory(facts: GraphFacts) -> Iterator[str]:
    for space in dict.fromkeys((*facts.weight_bytes, *facts.cache_bytes, *facts.compute_bytes)):
        parts = [
            ("weights", facts.weight_bytes),
            ("cache", facts.cache_bytes),
            ("compute (predicted peak)", facts.compute_bytes),
        ]
        sizes_by_kind = ", ".join(
            f"{name} {mib(sizes.get(space, 0))}"
            for name, sizes in parts
            if name != "cache" or facts.cache_bytes
        )
        yield f"    {space:<8} {sizes_by_kind}"


def _native(facts: GraphFacts) -> Iterator[str]:
    native = facts.native
    if native is None:
        return
    yield (
        f"    machine code: {native.nodes} of {facts.nodes} nodes, "
        f"{native.instructions} instructions in {plural(native.programs, 'program')}, up "
        f"to {plural(native.threads, 'thread')}"
    )
    for op, reason, count in native.refused:
        yield f"    {count:4d} x {op:<12} not as machine code: {reason}"


def _checks(report: WarmupFacts, wide: bool) -> Iterator[str]:
    if not report.checks:
        yield "nothing was run: this is a prediction"
        yield ""
    for check in report.checks:
        yield (
            f"{check.graph}: {check.what}: first run {check.first_ms:.1f} ms, steady "
            f"{check.best_ms:.1f} ms"
        )
        if check.native is not None and check.ops:
            yield (
                "    op by op, each by itself, as it is checked; as machine code the step takes "
                f"{check.best_ms:.1f} ms in all:"
            )
        yield from _times(check) if wide else _few_times(check)
        yield (
            f"    against the reference in fp32, op by op (NMSE, at most {check.limit:.0e} "
            "allowed):"
        )
        longest = max((len(op) for op, _, _ in check.worst), default=0)
        for op, node, error in check.worst:
            maximum = f", at most {check.limits[op]:.0e}" if op in check.limits else ""
            maximum += ", of x as it is rounded" if op.endswith(", int8") else ""
            yield f"    {op:<{longest}} {error:8.1e}  worst at {node}{maximum}"
        if (native := check.native) is not None:
            yield (
                f"    machine code against node by node: {native.error:.1e}; {native.kernels} "
                f"kernels, {native.from_cache} of them from {native.folder or 'nowhere'}, the "
                f"others compiled in {native.compile_ms:.0f} ms"
            )
            tried = ", ".join(f"{count}: {ms:.2f} ms" for count, ms in native.tried)
            why = f"measured: {tried}" if tried else native.why
            yield (
                f"    decodes with {plural(native.threads, 'thread')}" + (f", {why}" if why else "")
            )
        for problem in check.failed:
            yield f"WARNING: {problem}"
        yield ""


def _times(check: Check) -> Iterator[str]:
    total = sum(o.ms for o in check.ops) or 1e-9
    yield f"    {'op':<12} {'nodes':>5} {'ms':>9} {'share':>6} {'GFLOP/s':>9} {'GB/s':>7}"
    for o in check.ops:
        yield (
            f"    {o.op:<12} {o.count:5d} {o.ms:9.2f} {100 * o.ms / total:5.1f}% "
            f"{o.gflop_per_s:9.1f} {o.gb_per_s:7.1f}"
        )


def _few_times(check: Check) -> Iterator[str]:
    total = sum(o.ms for o in check.ops) or 1e-9
    yield f"  {'op':<12} {'ms':>8} {'share':>6} {'GB/s':>7}"
    for o in check.ops:
        yield f"  {o.op:<12} {o.ms:8.2f} {100 * o.ms / total:5.1f}% {o.gb_per_s:7.1f}"


def _result(report: WarmupFacts) -> Iterator[str]:
    """Yield what matters most: whether all is as it should be, how fast it is, and what would
    help.
    """
    yield from _verdict(report)
    limits = reached(report)
    for check in report.checks:
        speed = f", {1e3 / check.best_ms:,.0f} a second" if check.best_ms else ""
        share = f"; {limits[check.graph]}" if check.graph in limits else ""
        yield f"  {check.graph}: {check.what} in {check.best_ms:.1f} ms{speed}{share}"
    if report.checks and not any(check.failed for check in report.checks):
        yield "  the results agree with the reference"
    yield from (f"  to do: {advice}" for advice in _advice(report))
    yield from (f"  to do: {advice}" for _, advice in hindrances(report))
    yield ""


def _advice(report: WarmupFacts) -> Iterator[str]:
    if any(check.failed for check in report.checks):
        yield "do not trust its answers; see whether they are right with --flash-attn off"
    if any(f.nodes and f.setting == "off" for f in report.flash):
        yield "--flash-attn auto takes less memory, and less time for large pictures and long texts"
    if report.refused and report.dtype != "fp32":
        yield "--dtype fp32: the device may take another number type"
    if report.elsewhere and not report.refused:
        if report.fit is not None and report.fit.cache_on_host:
            yield "use a shorter context, or more memory: keys and values lie on the host to fit"
        else:
            yield "leave out --override-tensor, which moved nodes elsewhere"
    if report.dequantized:
        yield "a file of another type, Q4_K_M or Q8_0, would be multiplied as it is stored"


def _verdict(report: WarmupFacts) -> Iterator[str]:
    if report.fully_accelerated:
        slow = "; ".join(what for what, _ in hindrances(report))
        yield (
            f"result: everything runs on {', '.join(report.devices)} as intended"
            + (f", and slower than it could: {slow}" if slow else "")
        )
        return
    wrong = sum(r.count for r in report.refused)
    parts = [f"{plural(wrong, 'node')} refused"] if wrong else []
    if report.elsewhere and not wrong:
        parts.append(f"{plural(report.elsewhere, 'node')} placed elsewhere by override")
    parts += [
        f"flash attention {f.state} in the {f.graph}"
        for f in report.flash
        if f.state != "on" and f.nodes
    ]
    parts += ["results differ from the reference"] if any(c.failed for c in report.checks) else []
    yield f"result: not fully on the accelerated path: {'; '.join(parts)}"
