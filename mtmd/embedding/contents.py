"""Queries and documents as people give them, made into parts of a message; documents one by one,
with what is wrong with each; and what comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import numpy as np

from mtmd.base.errors import DeviceError, MtmdError, PromptError
from mtmd.base.options import integer, refuse
from mtmd.clip.image.decode import Picture
from mtmd.embedding.receipt import DocumentReceipt, Ranked, Ranking, RankingReceipt, Vectors
from mtmd.prompt.audio_input import kind_of
from mtmd.prompt.load_image import ImageSource
from mtmd.prompt.prompts import PreparedPrompt
from mtmd.prompt.video_input import VideoInput

Part: TypeAlias = "Mapping[str, Any]"
"""Of a message, such as {"type": "text", "text": ...}."""
Content: TypeAlias = "str | Mapping[str, Any] | ImageSource | Picture | VideoInput | Sequence[Part]"
"""A query or a document: a text, a picture or a video; {"text", "image", "video"} with one of each,
or a list; or parts of a message, in their order.
"""
KINDS = ("video", "image", "text")  # in the order in which the model was shown them
MAX_DOCUMENTS = 1 << 16
SAMPLED = {"fps": 1.0, "max_frames": 64}  # of a video, as the authors ask for

T = TypeVar("T")
OnError: TypeAlias = Literal["raise", "return"]


def each_document(
    documents: Sequence[Content],
    prepare: Callable[[Content], T],
    on_error: OnError,
    failed: dict[int, str],
) -> Iterator[tuple[int, T]]:
    """Yield each document's place, and what `prepare` makes of it. An error ends it, and names the
    place, or, with "return", goes into `failed`. Raises MtmdError.
    """
    for index, document in enumerate(documents):
        try:
            prepared = prepare(document)
        except MtmdError as error:
            if on_error == "raise" or isinstance(error, DeviceError):
                raise named(error, f"documents[{index}]") from error
            failed[index] = str(error)
            continue
        yield index, prepared


def check_on_error(on_error: object) -> None:
    """Raises OptionError."""
    if on_error not in ("raise", "return"):
        refuse("on_error", on_error, "one of raise, return")


def document_receipt(prompt: PreparedPrompt) -> DocumentReceipt:
    """The receipt of the prompt that a document was read in."""
    images = tuple(one.receipt for one in prompt.images)
    return DocumentReceipt(len(prompt.tokens), images, prompt.videos)


def ranking_of(
    scores: Vectors, failed: dict[int, str], top_n: int | None, receipt: RankingReceipt
) -> Ranking:
    """The best `top_n` of the documents that have a score. Raises OptionError."""
    if top_n is not None:
        top_n = integer("top_n", top_n, 1, MAX_DOCUMENTS)
    order = sorted(np.flatnonzero(~np.isnan(scores)), key=lambda index: -scores[index])
    best = tuple(Ranked(int(index), float(scores[index])) for index in order[:top_n])
    return Ranking(scores, best, failed, receipt)


def listed(documents: object) -> list[Any]:
    is_list = isinstance(documents, Sequence) and not isinstance(documents, (str, bytes))
    if not is_list:
        raise PromptError(f"documents: found {type(documents).__name__}, expected a list")
    listed = list(cast("Sequence[Any]", documents))
    if not 0 < len(listed) <= MAX_DOCUMENTS:
        raise PromptError(
            f"documents: found {len(listed):,}, expected at least one and at most {MAX_DOCUMENTS:,}"
        )
    return listed


def parts_of(content: object) -> list[Part]:
    """The parts of a query or a document. Raises PromptError for what is neither."""
    if isinstance(content, str):
        return [part_of("text", content)]
    if isinstance(content, (list, tuple)) and all(isinstance(one, Mapping) for one in content):
        return [_sampled(one) for one in content]
    if isinstance(content, Mapping):
        if unknown := [key for key in content if key not in KINDS]:
            raise PromptError(f"found {unknown[0]!r:.60}, expected 'text', 'image' or 'video'")
        return [part_of(kind, one) for kind in KINDS for one in _several(content.get(kind))]
    return [part_of(kind_of(content), content)]


def _several(value: object) -> Sequence[Any]:
    if value is None:
        return ()
    return value if isinstance(value, (list, tuple)) else (value,)


def part_of(kind: str, value: Any) -> Part:
    if kind == "audio":
        raise PromptError("found audio, expected a text, a picture or a video")
    return _sampled({"type": kind, kind: value})


def _sampled(part: Part) -> Part:
    """A part, a video with the frames that the authors ask for, unless others are asked for.
    Raises PromptError for a text that is none.
    """
    if part.get("type") == "text" and not isinstance(part.get("text"), str):
        raise PromptError(f"text: found {type(part.get('text')).__name__}, expected a text")
    if part.get("type") != "video" or isinstance(part.get("video"), VideoInput):
        return part
    return {**SAMPLED, **part} if SAMPLED.keys().isdisjoint(part) else part


def named(error: MtmdError, location: str) -> MtmdError:
    """The error with its location before it; as it is where the device has failed."""
    if isinstance(error, DeviceError):
        return error
    return error.reworded(f"{location}: {error}")
