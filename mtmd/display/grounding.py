"""Boxes and points that an answer gives in the notations of vision-language models, read from its
text.

Nothing in most notations says what the numbers mean. `scale` is the likeliest reading, `why` its
reason; the page lets a person choose another. Box values are x1, y1, x2, y2, point values x, y,
whatever order the notation has them in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain, islice
from typing import Any

MAXIMUM = 200  # regions of one answer; a loop of a model must not fill the page
LOOKED_AT = 2000  # notations that are read for them: some give no region that can be drawn
LONGEST_LABEL = 120
CHARS_MAX = 1 << 20  # of an answer that are read
# characters that a JSON object about one region may have on either side of its numbers
OBJECT = 2000
Y_FIRST = "box_2d"
# In each of these patterns, what may be repeated without end cannot go on with the character after
# it, nor have the first one of the pattern in it: what fails at one place is not read again from
# the next (tests/test_patterns.py).
_NUMBER = r"-?\d{1,20}(?:\.\d{1,20})?"
_N = rf"\s*({_NUMBER})\s*"
_FOUR, _TWO = ",".join([_N] * 4), ",".join([_N] * 2)
_BOX_TAG = re.compile(
    r"(?:<(?:ref|\|object_ref_start\|)>([^<]*)<[^<>]*>\s*)?<(?:box|\|box_start\|)>([^<]*)<(?:/box|\|box_end\|)>"
)
_PAIRS = re.compile(rf"\({_TWO}\)\s*(?:,\s*)?\({_TWO}\)")
_LIST = re.compile(rf"\[{_FOUR}\]")
_LOC = re.compile(r"((?:<loc\d{4}>){4})\s*([^<;\n]*)")
_LOC_NUMBER = re.compile(r"\d{4}")
# Florence-2's: a text and its boxes behind it, or the four corners around it
_BIN = re.compile(r"(?:<loc_\d{1,3}>){4,400}")
_BIN_NUMBER = re.compile(r"\d{1,3}")
# DeepSeek-OCR's: one label, one box or several
_DET_TAG = re.compile(r"<\|ref\|>([^<]*)<\|/ref\|>\s*<\|det\|>([^<]*)<\|/det\|>")
# PaddleOCR-VL's: a text and the four corners around it, with marks around both or without
_SPOT = re.compile(r"(?:<\|LOC_\d{1,4}\|>){8}")
_SPOT_NUMBER = re.compile(r"\d{1,4}")
# HunyuanOCR's: a text and two corners behind it
_SPOT_PAIRS = re.compile(r"\((\d{1,4}),(\d{1,4})\),\((\d{1,4}),(\d{1,4})\)")
_MARK = re.compile(r"<\|\w{1,20}\|>")
_POINT_TAG = re.compile(r"<point\s([^<>]*)>([^<]*)</point>")
_ATTRIBUTE = re.compile(r'(?<!\w)(x|y|alt)="([^"]*)"')
_MEMBER = re.compile(
    rf"""["'](bbox_2d|bbox|box_2d|box|point_2d|point)["']\s*:\s*\[\[?({_N}(?:,{_N}){{1,3}})\]"""
)
_MEMBER_NUMBER = re.compile(_NUMBER)
_LABEL = re.compile(
    r"""["'](?:label|text_content|name|text|sub_label)["']\s*:\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)')"""
)
# What stands for a label where there is no text
_CATEGORY = re.compile(r"""["']category["']\s{0,9}:\s{0,9}["']([\w -]{1,40})["']""")


@dataclass(frozen=True)
class Region:
    kind: str  # "box" or "point"
    values: tuple[float, ...]
    label: str
    # "1", "100", "1000" or "1024": the number that stands for the whole width or height;
    # "processed", "original": pixels
    scale: str

    def asdict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Regions:
    """`scale` is "" where the notation itself says what its numbers mean: nothing is to be chosen
    then.
    """

    regions: tuple[Region, ...]
    scale: str
    why: str

    def asdict(self) -> dict[str, Any]:
        return {"regions": [r.asdict() for r in self.regions], "scale": self.scale, "why": self.why}


def find_regions(
    text: str,
    processed: tuple[int, int] | None = None,
    original: tuple[int, int] | None = None,
    scale: str = "",
) -> Regions | None:
    """Return those of an answer about one picture of these sizes (width, height); None where it
    gives none. `scale` is what the model's authors say of its numbers, "" where they do not.
    """
    result = islice(_read(text[:CHARS_MAX]), LOOKED_AT)
    regions = list(islice((r for r in result if _drawable(r)), MAXIMUM))
    if not regions:
        return None
    unscaled = [r for r in regions if not r.scale]
    if not unscaled:
        return Regions(tuple(regions), "", "the notation says so")
    if scale:
        why = "the model's authors say so"
    else:
        scale, why = _likeliest([v for r in unscaled for v in r.values], processed, original)
    return Regions(tuple(r if r.scale else replace(r, scale=scale) for r in regions), scale, why)


def _read(text: str) -> Iterator[Region]:
    """Read the regions in the most specific notation that there is: a bare list of four numbers
    counts only where there is no other.
    """
    tagged = chain(_from_tags(text), _from_json(text))
    first = next(tagged, None)
    if first is not None:
        yield first
        yield from tagged
        return
    spots = _SPOT_PAIRS.finditer(text)
    spot = next(spots, None)
    if spot is None:
        for match in _LIST.finditer(text):
            yield Region("box", _numbers(match.groups()), "", "")
        return
    for match in chain((spot,), spots):
        label = _label_before(text, match.start(), ")")
        yield Region("box", _numbers(match.groups()), label, "1000")


def _from_tags(text: str) -> Iterator[Region]:
    for match in _BOX_TAG.finditer(text):
        label, inside = (match[1] or "").strip(), match[2]
        for pattern in (_PAIRS, _LIST):
            for box in pattern.finditer(inside):
                yield Region("box", _numbers(box.groups()), label[:LONGEST_LABEL], "1000")
    for match in _DET_TAG.finditer(text):
        for box in _LIST.finditer(match[2]):
            yield Region("box", _numbers(box.groups()), match[1].strip()[:LONGEST_LABEL], "1000")
    for match in _SPOT.finditer(text):
        numbers = _numbers(_SPOT_NUMBER.findall(match[0]))
        across, down = numbers[::2], numbers[1::2]
        corners = min(across), min(down), max(across), max(down)
        yield Region("box", corners, _label_before(text, match.start()), "1000")
    for match in _LOC.finditer(text):
        y1, x1, y2, x2 = (float(n) for n in _LOC_NUMBER.findall(match[1]))
        yield Region("box", (x1, y1, x2, y2), match[2].strip()[:LONGEST_LABEL], "1024")
    for match in _BIN.finditer(text):
        label = _label_before(text, match.start(), ">")
        outline = text.endswith("<poly>", 0, match.start())
        for values in _boxes_of_bins(_numbers(_BIN_NUMBER.findall(match[0])), outline):
            yield Region("box", values, label, "1000")
    for match in _POINT_TAG.finditer(text):
        attributes = dict(_ATTRIBUTE.findall(match[1]))
        try:
            yield Region(
                "point",
                (float(attributes["x"]), float(attributes["y"])),
                (attributes.get("alt") or match[2]).strip()[:LONGEST_LABEL],
                "100",
            )
        except (KeyError, ValueError):
            continue


def _boxes_of_bins(numbers: tuple[float, ...], outline: bool) -> Iterator[tuple[float, ...]]:
    """Read boxes of four numbers each, or, of eight where those are none, and of an `outline`, the
    box around all points; a number is the middle of its thousandth.
    """
    middles = tuple(number + 0.5 for number in numbers)
    boxes = [middles[at : at + 4] for at in range(0, len(middles) - 3, 4)]
    if outline or (len(middles) == 8 and not all(x1 < x2 and y1 < y2 for x1, y1, x2, y2 in boxes)):
        across, down = middles[: len(middles) // 2 * 2 : 2], middles[1::2]
        boxes = [(min(across), min(down), max(across), max(down))]
    yield from boxes


def _label_before(text: str, end: int, ends: str = "") -> str:
    """The last words before a place, in its line and behind the place before, which `ends` so."""
    before = text[max(0, end - OBJECT) : end].rpartition("\n")[2]
    if ends:
        return before.rpartition(ends)[2].strip()[-LONGEST_LABEL:]
    parts = [part for part in _MARK.split(before) if part.strip()]
    return parts[-1].strip()[-LONGEST_LABEL:] if parts else ""


def _from_json(text: str) -> Iterator[Region]:
    """The members of JSON objects that give a place, wherever they stand; not whole documents, for
    an answer may be cut off.
    """
    for match in _MEMBER.finditer(text):
        key, numbers = match[1], _numbers(_MEMBER_NUMBER.findall(match[2]))
        if key.startswith("point"):
            if len(numbers) == 2:
                yield Region("point", numbers, _adjacent_label(text, *match.span()), "")
        elif len(numbers) == 4:
            x1, y1, x2, y2 = numbers
            label = _adjacent_label(text, *match.span())
            yield (
                Region("box", (y1, x1, y2, x2), label, "1000")
                if key == Y_FIRST
                else Region("box", numbers, label, "")
            )


def _adjacent_label(text: str, start: int, end: int) -> str:
    """The label in the object that holds the member from `start` to `end`."""
    opened = text.rfind("{", max(0, start - OBJECT), start)
    closed = text.find("}", end, end + OBJECT)
    inside = opened if opened >= 0 else start, closed if closed >= 0 else end + OBJECT
    match = _LABEL.search(text, *inside)
    if not match:
        category = _CATEGORY.search(text, *inside)
        return category[1] if category else ""
    if match[1] is None:
        return match[2][:LONGEST_LABEL]
    try:
        return str(json.loads(f'"{match[1]}"'))[:LONGEST_LABEL]
    except ValueError:
        return match[1][:LONGEST_LABEL]


def _numbers(texts: Iterable[str | None]) -> tuple[float, ...]:
    return tuple(float(t or "0") for t in texts)


def _drawable(region: Region) -> bool:
    if not all(0 <= v <= 1e5 for v in region.values):
        return False
    return region.kind == "point" or (
        region.values[0] < region.values[2] and region.values[1] < region.values[3]
    )


def _likeliest(
    values: list[float], processed: tuple[int, int] | None, original: tuple[int, int] | None
) -> tuple[str, str]:
    """Return what bare numbers most likely mean, and why."""
    maximum = max(values)
    if maximum <= 1:
        return "1", "no number is above 1: shares of the width and height"
    if maximum <= 1000:
        return "1000", "no number is above 1000, the whole width or height of most models"
    if processed and maximum <= max(processed):
        return (
            "processed",
            f"a number is above 1000 and within {processed[0]} × {processed[1]}, the size the "
            "model saw",
        )
    if original and maximum <= max(original):
        return (
            "original",
            f"a number is above 1000 and within {original[0]} × {original[1]}, the picture's own "
            "size",
        )
    return "processed", "a number is above 1000: pixels of what the model saw"
