"""A report of `fit` as text of 80 columns: what was asked, then each way with what it needs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from mtmd.base.text import plural
from mtmd.inspect.fit_facts import SERVED, FitFacts
from mtmd.kernels.report.facts import LayoutFacts
from mtmd.loaded.fitting.alternatives import NOTHING
from mtmd.loaded.fitting.needed_memory import HOST, MAX_ANSWERS

WIDTH = 80
GIB, MIB = 1 << 30, 1 << 20
NOT_RUN = "PREDICTED: no weight is read, nothing is run."
# Resident memory after an answer, less what is predicted: 336 MiB for the demo model, 364 MiB for
# Qwen2.5-Coder-0.5B in Q4_K_M (torch 2.13, Linux on x86-64).
ALONGSIDE_BYTES = 350 * MIB
ALONGSIDE = "Python, torch and compiled code take some 350 MiB of the host beside."


def render_fit(report: FitFacts) -> str:
    lines = [*_head(report), "", *_table(report), *_result(report)]
    return "\n".join(line.rstrip() for line in lines)


def _head(report: FitFacts) -> Iterator[str]:
    stored = "" if report.kv_type == report.dtype else f", keys and values in {report.kv_type}"
    yield from _wrapped(f"{report.model}, {report.dtype}{stored}: {_requested(report)}")
    for device in report.devices:
        if device.memory_bytes is not None:
            usable = _size(report, device.usable_bytes)
            size = f"{_size(report, device.memory_bytes)}, of which {usable} are usable"
        elif device.usable_bytes is not None:
            size = f"{_size(report, device.usable_bytes)} usable"
        else:
            size = "of unknown size (give --host-memory)"
        counted = ""
        if device.counted < report.answers:
            counted = f"; keys and values of {device.counted} are counted, others wait for room"
        yield from _wrapped(f"  {device.name}: {device.what}, {size}{counted}")
    yield NOT_RUN
    yield ALONGSIDE


def _requested(report: FitFacts) -> str:
    many = f"{plural(report.answers, 'answer')} at once"
    text = f"{many} of {report.context:,} tokens"
    if not report.picture_tokens:
        return f"{text}, no pictures"
    size = "the largest picture"
    if report.picture_size:
        size = f"pictures of {report.picture_size[0]} x {report.picture_size[1]} pixels"
    return f"{text}, {size} ({plural(report.picture_tokens, 'token')})"


def _table(report: FitFacts) -> Iterator[str]:
    columns = ("weights", "tower", "KV", "activ.", "needed", "usable")
    yield f"{_unit(report)[1]:<18}" + "".join(f"{c:>10}" for c in columns)
    for layout in report.layouts:
        yield from _layout(report, layout)


def _layout(report: FitFacts, layout: LayoutFacts) -> Iterator[str]:
    if layout.reason is not None:
        yield from _wrapped(f"CANNOT BE   {layout.name}: {layout.reason}")
        return
    verdict = "FITS" if layout.fits else "DOES NOT FIT"
    if layout.fits and layout.unknown:
        verdict = "UNKNOWN"
    chosen = " (chosen)" if layout.name == report.chosen else ""
    yield from _wrapped(f"{verdict:<12}  {layout.name}{chosen}")
    runs = {part.device: part for part in layout.layers}
    for memory in layout.memories:
        parts = (memory.weights, memory.encoder, memory.cache, memory.compute, memory.needed)
        cells = "".join(f"{_number(report, size):>10}" for size in parts)
        usable = "" if memory.available is None else _number(report, memory.available)
        mark = "" if memory.fits else " *"
        run = runs.get(memory.space)
        where = memory.space if run is None else f"{memory.space}, {run.first}-{run.last}"
        yield f"    {where:<14}{cells}{usable:>10}{mark}"
    if layout.longest_context is not None and layout.most_answers is not None:
        limit = ", the model's limit" if layout.longest_context == report.context_most else ""
        longest = f"{layout.longest_context:,}{limit}" if layout.longest_context else "none"
        if layout.longest_text:
            longest = f"none with pictures, {layout.longest_text:,} without"
        more = " or more" if layout.most_answers == MAX_ANSWERS else ""
        maximum = f"{layout.most_answers:,}{more}" if layout.most_answers else "none"
        yield from _wrapped(f"    longest context: {longest}; maximum concurrent chats: {maximum}")


def _result(report: FitFacts) -> Iterator[str]:
    if any(not m.fits for layout in report.layouts for m in layout.memories):
        yield "* is more than usable"
    runs = [part for layout in report.layouts for part in layout.layers if part.first < part.last]
    for part in runs[:1]:
        what = f"{part.device}, {part.first}-{part.last}"
        yield f"'{what}': layers {part.first} to {part.last} are on {part.device}"
    yield ""
    if report.chosen is not None:
        yield from _wrapped(f"result: fits {report.chosen}")
        yield from _in_all(report)
        return
    advice = "; or ".join(report.advice)
    if not report.undecided:
        yield from _wrapped(
            f"result: fits nowhere{_needed(report)}; "
            + (f"what would fit: {advice}" if advice else NOTHING)
        )
        return
    first = report.undecided[0]
    needs = " and ".join(f"{_size(report, m.needed)} usable of {m.space}" for m in first.unknown)
    reported = f"result: does not fit in any memory of known size; with {needs}: {first.name}"
    yield from _wrapped(reported + (f"; it would fit with {advice}" if advice else ""))


def _needed(report: FitFacts) -> str:
    """Return how much memory the layout that lacks least needs."""
    lacking = {
        layout: [m for m in layout.memories if not m.fits]
        for layout in report.layouts
        if layout.reason is None
    }
    if not lacking:
        return ""
    nearest = min(lacking, key=lambda one: sum(m.needed - (m.available or 0) for m in lacking[one]))
    sizes = [f"{_size(report, m.needed)} usable of {m.space}" for m in lacking[nearest]]
    return f" (as requested it needs {' and '.join(sizes)}: {nearest.name})"


def _in_all(report: FitFacts) -> Iterator[str]:
    """Yield how much `mtmd describe` and `mtmd serve` take, where all lies in one memory, and with
    how many answers at once the server fits, where its default number does not.
    """
    chosen = [layout for layout in report.layouts if layout.name == report.chosen]
    if not chosen or len(chosen[0].memories) > 1:
        return
    (memory,) = chosen[0].memories
    counted = next(d.counted for d in report.devices if d.name == memory.space)
    answer, served = memory.cache // counted, report.served
    one, all_of_them = (memory.needed - memory.cache + count * answer for count in (1, served))
    extra = ALONGSIDE_BYTES if memory.space == HOST else 0
    with_python = ", Python and torch included" if extra else ""
    alone, together = (_size(report, size + extra) for size in (one, all_of_them))
    described = f"in all{with_python}: 'mtmd describe' takes up to {alone}"
    answers = plural(served, "answer")
    if memory.available is None or all_of_them <= memory.available:
        option = f" --parallel {served}" if served != SERVED else ""
        filled = "fills its" if served == 1 else "at once fill their"
        yield from _wrapped(
            f"{described}; 'mtmd serve{option}' up to {together}, when {answers} {filled} context"
        )
    elif counted < report.answers:
        yield from _wrapped(
            f"{described}; 'mtmd serve' would take {together}, if {answers} at once filled their "
            "context: as that is more than usable, some of them wait for room"
        )
    else:
        yield from _wrapped(
            f"{described}; 'mtmd serve' with its {answers} at once needs {together} and does not "
            f"fit; with '--parallel {chosen[0].most_answers}' it does"
        )


def _unit(report: FitFacts) -> tuple[int, str]:
    """MiB where all is small."""
    needs = [m.needed for layout in report.layouts for m in layout.memories]
    return (GIB, "GiB") if max(needs, default=0) >= 2 * GIB else (MIB, "MiB")


def _number(report: FitFacts, size: int) -> str:
    return f"{size / _unit(report)[0]:,.1f}"


def _size(report: FitFacts, size: int | None) -> str:
    return "?" if size is None else f"{_number(report, size)} {_unit(report)[1]}"


def _wrapped(text: str) -> list[str]:
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent + "  ", break_on_hyphens=False)
