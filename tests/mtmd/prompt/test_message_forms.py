"""Messages that run with other libraries run here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtmd.base.errors import PromptError
from mtmd.clip.image.decode import Picture
from mtmd.prompt.conversation import read_conversation, requested
from mtmd.prompt.message_forms import in_json_types, in_own_form
from mtmd.prompt.video_input import VideoInput

RED = np.full((4, 6, 3), (255, 0, 0), np.uint8)
BLUE = np.full((2, 3, 3), (0, 0, 255), np.uint8)
HOLE = {"type": "image"}
PNG, CLIP = "data:image/png;base64,iVBO", "data:;base64,AAAAGGZ0eXBpc29t"  # their first bytes


def user(*content: Any) -> list[Any]:
    return [{"role": "user", "content": [*content]}]


def text(stated: str) -> dict[str, str]:
    return {"type": "text", "text": stated}


@pytest.mark.parametrize(
    ("part", "own"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png"}}, ("image", "a.png")),
        ({"type": "image_url", "image_url": "a.png"}, ("image", "a.png")),
        ({"type": "input_image", "image_url": "a.png"}, ("image", "a.png")),
        ({"type": "image", "url": "a.png"}, ("image", "a.png")),
        ({"type": "image", "path": "a.png"}, ("image", "a.png")),
        ({"type": "image", "base64": "iVBO"}, ("image", "data:;base64,iVBO")),
        ({"type": "image", "image": None, "url": "a.png"}, ("image", "a.png")),
        ({"type": "video", "url": "a.mp4"}, ("video", "a.mp4")),
        ({"type": "video_url", "video_url": {"url": "a.mp4"}}, ("video", "a.mp4")),
        ({"type": "input_text", "text": "x"}, ("text", "x")),
        ({"type": "file", "file": {"file_data": PNG, "filename": "a.png"}}, ("image", PNG)),
        ({"type": "input_file", "file_data": "iVBO"}, ("image", "data:;base64,iVBO")),
        ({"type": "input_file", "file_data": CLIP}, ("video", CLIP)),
        (
            {"type": "image", "source": {"media_type": "image/png", "data": "iVBO"}},
            ("image", "data:image/png;base64,iVBO"),
        ),
        ({"type": "image", "source": {"type": "url", "url": "a.png"}}, ("image", "a.png")),
    ],
    ids=lambda value: str(value),
)
def test_parts_as_others_write_them(part: dict[str, Any], own: tuple[str, str]) -> None:
    assert in_own_form(user(part)) == user({"type": own[0], own[0]: own[1]})


@pytest.mark.parametrize(
    ("part", "reported"),
    [
        ({"type": "file", "file": {"file_id": "file-1"}}, "found a part of type 'file', expected"),
        ({"type": "image", "source": {}}, "a part of type 'image' has no 'image'; write"),
        ("hi", "found str as a part, expected one of type 'text', 'image', 'video' or 'audio'"),
        ({"text": "hi"}, "found dict as a part, expected one of type"),
    ],
    ids=str,
)
def test_what_is_no_part_is_told(part: Any, reported: str) -> None:
    with pytest.raises(PromptError, match=re.escape(reported)):
        read_conversation(in_own_form(user(part)), str)


def test_what_stands_beside_a_source_stays() -> None:
    seen = {"type": "image_url", "image_url": {"url": "a.png", "detail": "low"}}
    clip = {"type": "video", "path": "a.mp4", "fps": 2}
    assert in_own_form(user(seen, clip)) == user(
        {"type": "image", "image": "a.png", "detail": "low"},
        {"type": "video", "video": "a.mp4", "fps": 2},
    )


@pytest.mark.parametrize(
    ("part", "saved"),
    [
        ({"type": "image", "image": Picture(RED, (6, 4)), "detail": "low"}, {"image": "data:RED"}),
        ({"type": "image", "image": Path("a.png")}, {"image": "a.png"}),
        ({"type": "image", "image": b"GIF89a"}, {"image": "data:image/gif;base64,R0lGODlh"}),
        ({"type": "video", "video": Path("a.mp4"), "fps": 2}, {"video": "a.mp4", "fps": 2}),
        (
            {"type": "video", "video": VideoInput("a.mp4", fps=2, end=3.0)},
            {"video": "a.mp4", "fps": 2, "end": 3.0},
        ),
        (
            {"type": "video", "video": VideoInput(b"\0\0\0\x18ftypisom")},
            {"video": "data:video/mp4;base64,AAAAGGZ0eXBpc29t"},
        ),
        ({"type": "image"}, {}),
        (text("x"), {}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_parts_in_types_of_json(part: dict[str, Any], saved: dict[str, Any]) -> None:
    (result,) = in_json_types(user(part), lambda _: "data:RED")
    assert result == user(part | saved)[0] and json.loads(json.dumps(result)) == result


def test_frames_that_were_given_stay() -> None:
    frames = user({"type": "video", "video": VideoInput([RED, RED], rate=2)})
    assert in_json_types(frames, str)[0]["content"] == frames[0]["content"]


@pytest.mark.parametrize(
    ("content", "parts"),
    [("x", [text("x")]), (None, []), ("", []), ([text("x")], [text("x")])],
    ids=str,
)
def test_pictures_beside_a_text_as_ollama_has_them(content: Any, parts: list[Any]) -> None:
    clip = VideoInput("b.mp4")
    both = [{"type": "image", "image": "a.png"}, {"type": "video", "video": clip}]
    alongside = {"role": "user", "content": content, "images": ["a.png", clip]}
    assert in_own_form([alongside]) == user(*both, *parts)
    assert in_own_form([{**alongside, "images": "a.png"}]) == user(both[0], *parts)
    for none in (None, []):
        (plain,) = in_own_form([{"role": "user", "content": "x", "images": none}])
        assert plain["content"] in ("x", [text("x")])


@pytest.mark.parametrize("name", ["image", "image_url", "video", "videos"])
def test_what_shows_nothing_beside_a_text_is_refused(name: str) -> None:
    message = {"role": "user", "content": "x", name: "a.png"}
    with pytest.raises(PromptError, match=f"message 1: found '{name}' beside the content"):
        read_conversation([message], str)
    assert read_conversation([{**message, name: None}], str).messages


@pytest.mark.parametrize(
    ("requested", "closest"),
    [((), "auto"), (("low",), "low"), (("low", None), "auto"), (("low", "high"), "high")],
    ids=str,
)
def test_the_closest_look_is_asked_for(requested: tuple[Any, ...], closest: str) -> None:
    parts = [{"type": "image", "image": RED, "detail": detail} for detail in requested]
    assert read_conversation(user(text("x"), *parts), str).detail == closest


@pytest.mark.parametrize(
    "strange",
    [
        3,
        None,
        "x",
        {"role": "user"},
        {"role": "user", "content": [3, {"type": []}]},
        {"role": "user", "content": 3, "images": ["a.png"]},
    ],
    ids=str,
)
def test_what_is_no_message_is_left_to_who_checks_it(strange: Any) -> None:
    assert in_own_form([strange]) == [strange]


def test_pictures_beside_messages_take_their_places() -> None:
    messages = [
        *user(HOLE, text("a")),
        {"role": "assistant", "content": "b"},
        *user(text("c"), HOLE),
    ]
    result = read_conversation(requested([RED, BLUE], None, messages), str)
    assert [picture.size for picture in result.pictures] == [(6, 4), (3, 2)]
    assert [p["type"] for p in result.messages[2]["content"]] == ["text", "image"]
    assert requested(RED, None, user(HOLE))[0]["content"][0]["image"] is RED
    assert messages[0]["content"][0] == HOLE, "what was given is left as it is"


def test_pictures_beside_a_single_turn_without_places_come_before_its_text() -> None:
    system = {"role": "system", "content": "be brief"}
    for turn in ({"role": "user", "content": "what?"}, user(text("what?"))[0]):
        result = requested([RED, BLUE], None, [system, turn])
        assert result[0] == system and [p["type"] for p in result[1]["content"]] == [
            *("image", "image", "text")
        ]
        assert (
            result[1]["content"][0]["image"] is RED and result[1]["content"][2]["text"] == "what?"
        )
    several = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "a dot"}] * 2
    with pytest.raises(PromptError, match="found 1 beside messages with no places for them"):
        requested(RED, None, several)


@pytest.mark.parametrize(
    ("images", "holes", "reported"),
    [
        ([RED, BLUE], [HOLE], "found 2 beside messages with 1 place for them, expected as many"),
        ([RED], [HOLE, HOLE], "found 1 beside messages with 2 places"),
    ],
    ids=["too many", "too few"],
)
def test_another_number_of_pictures_than_places(
    images: Any, holes: list[Any], reported: str
) -> None:
    with pytest.raises(PromptError, match=reported):
        requested(images, None, user(*holes, text("x")))
