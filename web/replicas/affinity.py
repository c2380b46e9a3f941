"""The common part of requests: the picture that they are about, or how their conversation begins.
Read without regard to which interface a request is of; what cannot be found costs a cache hit and
nothing else, as the server that answers reads the request itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from mtmd.web.errors import ApiError
from mtmd.web.intake.json_limits import check_json
from mtmd.web.intake.long_texts import CutBody, CutText, Memory
from mtmd.web.settings import JsonLimits

BEGINNING = 1024  # characters of the first thing said
NAMED_CHARS = 256  # of an id
_PICTURES = {
    "data", "file", "file_data", "file_url", "image", "image_url", "images", "input_image",
    "input_video", "multimodal_data", "url", "video", "video_url",
}  # fmt: skip
_TEXTS = {"content", "input", "instructions", "prompt", "prompt_string", "system", "text"}
_SYSTEM = {"developer", "system"}
_SAVED = {"file", "resp_req"}  # what ids of things that a replica keeps begin with
_NUMBER = re.compile(r"[0-9a-f]{16,64}")
_NO_ID = re.compile(r"[^a-z0-9_-]+")


@dataclass(frozen=True)
class Common:
    """`key`: equal for requests that one cache serves, "" where nothing was found. `named`: the
    replica that keeps what the request refers to by an id, "" where it refers to nothing.
    """

    key: str = ""
    named: str = ""


def common(body: Memory, tenant: str, limits: JsonLimits) -> Common:
    """Return what a request with this body shares with others. `tenant`: the owner of the
    caches.
    """
    try:
        cut = CutBody(body)
        check_json(cut.data, limits, cut.escapes)
        request = json.loads(cut.data)
    except (ApiError, ValueError, RecursionError):  # the server says what is wrong
        return Common()
    picture: str | CutText = ""
    system, stated, named = "", "", ""
    for kind, part in _parts(request):
        if kind == "picture" and isinstance(taken := cut.take(part), CutText):
            picture = picture or taken
            continue
        text = cut.text(part)
        if kind == "id":
            named = named or named_in(text)
        elif kind == "picture":
            named = named or named_in(text)
            picture = picture or text
        elif kind == "system":
            system += text
        elif not stated:
            stated = text[:BEGINNING]
    if picture:
        what = _in_one_form(picture)
    elif stated or system:
        what = f"{system}\0{stated}"
    else:
        return Common(named=named)
    return Common(sha256(f"{tenant}\0{what}".encode("utf-8", "replace")).hexdigest(), named)


def _in_one_form(picture: str | CutText) -> str:
    """Equal, whether it was sent as a data URL or as base64 alone."""
    if isinstance(picture, CutText):
        return sha256(picture.data).hexdigest()
    return picture.partition(",")[2] if picture.startswith("data:") else picture


def named_in(text: str) -> str:
    """The replica in the id of a file or response; "" where there is none."""
    for word in _NO_ID.split(text[:NAMED_CHARS]):
        kind, _, rest = word.partition("-")
        name, _, number = rest.partition("-")
        if kind in _SAVED and name.isalnum() and _NUMBER.fullmatch(number):
            return name
    return ""


def _parts(value: Any, under: str = "", role: str = "") -> Iterator[tuple[str, str]]:
    """Texts by what they are, in the order in which they stand: "id", "picture", "system",
    "said".
    """
    if isinstance(value, dict):
        role = value["role"] if isinstance(value.get("role"), str) else role
        for name, part in value.items():
            if isinstance(part, str) and name in ("file_id", "previous_response_id"):
                yield "id", part
            elif name in ("messages", "source") or name in _PICTURES or name in _TEXTS:
                inner = under if under in _PICTURES or name in ("messages", "source") else name
                yield from _parts(
                    part, inner, "system" if name in ("system", "instructions") else role
                )
    elif isinstance(value, list):
        for part in value:
            yield from _parts(part, under, role)
    elif isinstance(value, str) and value:
        if under in _PICTURES:
            yield "picture", value
        elif under:
            yield ("system" if role in _SYSTEM else "said"), value
