"""An answer as a notebook shows it: the pictures with the boxes that the answer gives, its text,
its receipt. Plain HTML that brings its own pictures and asks for nothing elsewhere.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from mtmd.base.errors import MtmdError
from mtmd.clip.image.decode import Picture
from mtmd.clip.image.pixels import Pixels
from mtmd.display.grounding import Region, Regions, find_regions
from mtmd.events import Answer, Box
from mtmd.prompt.conversation import Message
from mtmd.prompt.load_image import load_image, preview
from mtmd.prompt.url_kinds import is_url
from mtmd.receipt import ImageReceipt

EDGE = 512  # pixels of a preview's longer side
GONE = "the file is not what was asked about any more"
COLOURS = ("#e5484d", "#30a46c", "#0090ff", "#f5a524", "#8e4ec6", "#12a594")
WHOLE = {"1": 1.0, "100": 100.0, "1000": 1000.0, "1024": 1024.0}


@dataclass(frozen=True)
class Shown:
    """A picture to be shown later: the `path` it was read from, or, of one without, its `sha256`
    with its pixels or a small JPEG of them.
    """

    path: str | None
    sha256: str = ""
    content: Pixels | bytes = b""

    def load(self) -> tuple[str, bytes]:
        """Load its digest and a small JPEG. Raises MtmdError for a file that is gone."""
        if self.path is not None:
            picture = load_image(self.path)
            return picture.sha256, preview(picture.pixels, EDGE)
        if isinstance(self.content, bytes):
            return self.sha256, self.content
        return self.sha256, preview(self.content, EDGE)


@dataclass(frozen=True)
class AnswerView:
    """Describes what belongs to an answer on the screen, in the conversation's order."""

    pictures: tuple[Shown, ...]

    def html(self, answer: Answer) -> str:
        receipts = {r.sha256: r for r in answer.receipt.images}
        alone = len(self.pictures) == 1
        figures = "".join(_figure(shown, receipts, answer.text, alone) for shown in self.pictures)
        thought = ""
        if answer.thinking:
            style = "white-space:pre-wrap;max-width:46em"
            thought = f'<p style="{style}">{escape(answer.thinking)}</p>'
            thought = f"<details><summary>thought</summary>{thought}</details>"
        return (
            f'<div class="mtmd-answer">{figures}{thought}'
            f'<p style="white-space:pre-wrap;max-width:46em">{escape(answer.text)}</p>'
            "<details><summary>receipt</summary>"
            f'<pre style="white-space:pre-wrap">{escape(str(answer.receipt))}</pre></details></div>'
        )

    def boxes(self, answer: Answer) -> tuple[Box, ...]:
        if len(self.pictures) != 1 or len(answer.receipt.images) != 1:
            return ()
        receipt = answer.receipt.images[0]
        size = receipt.original_size
        regions = find_regions(answer.text, receipt.processed_size, size, receipt.box_scale)
        return tuple(
            Box(region.label, *(f * size[i % 2] for i, f in enumerate(_shares(region, receipt))))
            for region in (regions.regions if regions else ())
            if region.kind == "box"
        )


def view_of(messages: Sequence[Message], *, one_of_many: bool = False) -> AnswerView:
    """Return what shows the pictures of a conversation that are files, or loaded. Their small
    JPEGs take longer to make than the answer to a short question: they are made when they are
    shown, but for `one_of_many` answers, which would keep the pixels of all pictures in memory.
    """
    sources = [part["image"] for message in messages for part in _images(message)]
    return AnswerView(
        tuple(_shown(s, one_of_many) for s in sources if isinstance(s, (str, os.PathLike, Picture)))
    )


def with_pictures_loaded(
    messages: Sequence[Message], load: Callable[..., Picture]
) -> list[Message]:
    """The conversation with pictures that are no files loaded: as they are now, they can be shown
    later (`view_of`). Raises ImageError.
    """
    several, made, number = sum(map(len, map(_images, messages))) > 1, [], 0
    for message in messages:
        images = _images(message)
        if not images:
            made.append(message)
            continue
        parts: list[Any] = []
        for part in message["content"]:
            if any(part is image for image in images):
                number += 1
                source = part["image"]
                if is_url(source) or not isinstance(source, (str, os.PathLike, Picture)):
                    name = f"image {number}" if several else "image"
                    part = {**part, "image": load(source, unnamed=name)}
            parts.append(part)
        made.append({**message, "content": parts})
    return made


def _shown(source: str | os.PathLike[str] | Picture, small: bool) -> Shown:
    if isinstance(source, Picture):
        pixels = source.pixels
        return Shown(None, source.sha256, preview(pixels, EDGE) if small else pixels)
    return Shown(os.fsdecode(os.fspath(source)))


def _images(message: Any) -> list[Mapping[str, Any]]:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, (list, tuple)):
        return []
    return [
        p for p in content if isinstance(p, Mapping) and p.get("type") == "image" and "image" in p
    ]


def _figure(shown: Shown, receipts: Mapping[str, ImageReceipt], text: str, alone: bool) -> str:
    try:
        digest, jpeg = shown.load()
    except MtmdError as error:
        return f"<p><em>{escape(str(error))}</em></p>"
    receipt = receipts.get(digest)
    if receipt is None:
        return f"<p><em>{escape(str(shown.path))}: {GONE}</em></p>"
    sizes = receipt.processed_size, receipt.original_size
    regions = find_regions(text, *sizes, receipt.box_scale) if alone else None
    return picture_html(jpeg, _overlay(regions, receipt) if regions else "")


def picture_html(jpeg: bytes, over: str = "") -> str:
    """A picture that brings its own bytes, with what lies `over` it."""
    return (
        '<figure style="position:relative;display:inline-block;margin:0 8px 8px 0">'
        f'<img alt="a picture" src="data:image/jpeg;base64,{base64.b64encode(jpeg).decode()}" '
        f'style="display:block;max-width:100%">{over}</figure>'
    )


def _overlay(regions: Regions, receipt: ImageReceipt) -> str:
    """Boxes and points over the picture, as SVG in percent of it."""
    drawn = "".join(
        _drawn(region, receipt, COLOURS[i % len(COLOURS)])
        for i, region in enumerate(regions.regions)
    )
    return (
        '<svg viewBox="0 0 100 100" preserveAspectRatio="none" '
        f'style="position:absolute;inset:0;width:100%;height:100%">{drawn}</svg>'
    )


def _drawn(region: Region, receipt: ImageReceipt, colour: str) -> str:
    title = f"<title>{escape(region.label)}</title>" if region.label else ""
    locations = [100 * share for share in _shares(region, receipt)]
    if region.kind == "point":
        return (
            f'<circle cx="{locations[0]:.2f}" cy="{locations[1]:.2f}" r="1.5" fill="{colour}">'
            f"{title}</circle>"
        )
    left, top, right, bottom = locations
    return (
        f'<rect x="{left:.2f}" y="{top:.2f}" width="{right - left:.2f}" '
        f'height="{bottom - top:.2f}" fill="none" stroke="{colour}" stroke-width="2" '
        f'vector-effect="non-scaling-stroke">{title}</rect>'
    )


def _shares(region: Region, receipt: ImageReceipt) -> list[float]:
    """Return its values as shares of the picture's width and height."""
    width, height = (
        receipt.original_size
        if region.scale == "original"
        else receipt.processed_size
        if region.scale == "processed"
        else (WHOLE[region.scale],) * 2
    )
    return [v / (height if i % 2 else width) for i, v in enumerate(region.values)]
