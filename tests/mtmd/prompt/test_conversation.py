"""Messages as people write them: what is read, in which order, and what is refused."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mtmd.base.errors import ImageError, PromptError
from mtmd.prompt.conversation import read_conversation, user_message

RED = np.full((4, 6, 3), (255, 0, 0), np.uint8)
BLUE = Image.new("RGB", (3, 2), (0, 0, 255))


def seal(text: str) -> str:
    return f"<{text}>"


def read(*messages: Any) -> Any:
    return read_conversation(messages, seal)


def test_all_text_is_sealed_and_pictures_stay_in_order() -> None:
    result = read(
        {"role": "system", "content": "be brief"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "a"},
                {"type": "image", "image": RED},
                {"type": "text", "text": "b"},
                {"type": "image", "image": BLUE},
            ],
        },
        {"role": "assistant", "content": "no"},
        {
            "role": "user",
            "content": ({"type": "image", "image": RED}, {"type": "text", "text": "c"}),
        },
    )
    assert result.messages == (
        {"role": "system", "content": "<be brief>"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<a>"},
                {"type": "image"},
                {"type": "text", "text": "<b>"},
                {"type": "image"},
            ],
        },
        {"role": "assistant", "content": "<no>"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<c>"}]},
    )
    assert [p.size for p in result.pictures] == [(6, 4), (3, 2), (6, 4)]


@pytest.mark.parametrize(
    ("image", "count"),
    [(RED, 1), ([RED], 1), ([RED, BLUE], 2), ((RED, BLUE, RED), 3)],
    ids=["alone", "a list of one", "a list of two", "a tuple of three"],
)
def test_user_message(image: Any, count: int) -> None:
    result = read(user_message(image, "what?"))
    assert len(result.pictures) == count
    assert [p["type"] for p in result.messages[0]["content"]] == ["image"] * count + ["text"]


def test_pictures_may_come_from_a_generator(tmp_path: Path) -> None:
    assert len(read(user_message((x for x in (RED, BLUE)), "what?")).pictures) == 2  # type: ignore[arg-type]
    BLUE.save(tmp_path / "a.png")
    with (tmp_path / "a.png").open("rb") as file:
        assert len(read(user_message(file, "what?")).pictures) == 1, "a file is an iterator, too"
    with pytest.raises(ImageError, match="an iterator of more than 1,024, expected the pictures"):
        user_message(itertools.repeat(RED), "what?")  # type: ignore[arg-type]


@pytest.mark.parametrize("none", [[], ()], ids=str)
def test_an_empty_list_is_no_picture(none: Any) -> None:
    with pytest.raises(
        ImageError, match="images: found an empty list, expected at least one; give"
    ):
        user_message(none, "what?")


def test_a_prompt_that_is_no_text() -> None:
    with pytest.raises(
        PromptError, match="message 1: the text is of type NoneType, expected a str"
    ):
        read(user_message(RED, None))  # type: ignore[arg-type]


def test_of_several_pictures_the_wrong_one_is_named() -> None:
    for wrong in (b"no picture", None, ""):
        with pytest.raises(ImageError, match=r"^image 2: found "):
            read(user_message([RED, wrong], "what?"))
        with pytest.raises(ImageError, match=r"^image 3: found "):
            read(user_message([RED, BLUE], "what?"), user_message(wrong, "and here?"))  # type: ignore[arg-type]
        with pytest.raises(ImageError, match=r"^image: found "):
            read(user_message(wrong, "what?"))  # type: ignore[arg-type]
    with pytest.raises(ImageError, match=r"^missing\.png: found no such file"):
        read(user_message([RED, "missing.png"], "what?"))


def test_a_picture_object_is_taken_as_it_is() -> None:
    picture = read(user_message(RED, "x")).pictures[0]
    assert read(user_message(picture, "x")).pictures[0] is picture


USER = {"role": "user", "content": "x"}
REFUSED: dict[str, tuple[Any, str]] = {
    "no list": ("hello", "found str, expected a list"),
    "bytes": (b"hello", "found bytes"),
    "one message": (USER, "found dict, expected a list"),
    "none": (None, "found NoneType"),
    "nothing": ([], "found an empty list, expected a list of at least one"),
    "a number": (3, "found int"),
    "an iterator": (iter([USER]), "expected a list"),
    "a message that is text": (
        ["x"],
        "message 1: found str, expected a mapping with 'role' and 'content'",
    ),
    "several conversations": ([[USER]], "found list, .*; each conversation is a call of its own"),
    "no role": ([{"content": "x"}], "message 1: found no text as 'role', expected a mapping"),
    "a role that is no text": ([USER, {"role": 1, "content": "x"}], "message 2"),
    "no content": ([{"role": "user"}], "content is NoneType, expected a text or a list of parts"),
    "content that is a part": (
        [{"role": "user", "content": {"type": "text", "text": "x"}}],
        "content is dict",
    ),
    "a part that is text": ([{"role": "user", "content": ["x"]}], "found str as a part, expected"),
    "text that is none": (
        [{"role": "user", "content": [{"type": "text", "text": None}]}],
        "message 1: the text is of type NoneType, expected a str",
    ),
    "a text that is missing": (
        [{"role": "user", "content": [{"type": "text"}]}],
        "a part of type 'text' has no 'text'; write",
    ),
    "an empty role": ([{"role": "", "content": "x"}], "messages[0] has role ''; expected a word"),
    "a role that spells a control token": (
        [{"role": "user", "content": "x"}, {"role": "user<end_of_turn>", "content": "x"}],
        "messages[1] has role 'user<end_of_turn>'; expected a word such as",
    ),
    "a content that is a number": ([{"role": "user", "content": 5}], "content is int, expected"),
    "a text that is a number": (
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        "message 1: the text is of type int, expected a str",
    ),
    "a detail that is none": (
        [{"role": "user", "content": [{"type": "image", "image": RED, "detail": "much"}]}],
        "message 1: found the detail 'much', expected one of low, auto, high",
    ),
    "an unknown part": (
        [{"role": "user", "content": [{"type": "scent", "scent": "a.nose"}]}],
        "found a part of type 'scent'",
    ),
    "an image without one": (
        [{"role": "user", "content": [{"type": "image"}]}],
        """a part of type 'image' has no 'image'; write {"type": "image", "image": SOURCE}""",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    messages, expected = REFUSED[case]
    with pytest.raises(PromptError) as caught:
        read_conversation(messages, seal)
    begin, _, end = expected.partition(".*")
    reported = str(caught.value)
    assert begin in reported and reported.endswith(end) and reported.isprintable()


@pytest.mark.parametrize(
    "content", ["", " ", "\n\t  \u3000", [], [{"type": "text", "text": " "}]], ids=str
)
def test_a_user_who_says_nothing(content: Any) -> None:
    with pytest.raises(PromptError, match="the prompt is empty; say what you want to know"):
        read_conversation([{"role": "user", "content": content}], str)
    # What else is said is for the chat template to read, as OpenAI's interface has it.
    talk = {"role": "system", "content": "talk"}
    assert len(read_conversation([talk, {"role": "user", "content": content}], str).messages) == 2
    assert read_conversation([talk], str).messages == (talk,)


@pytest.mark.parametrize("source", [None, 5, {}, [RED], "", "no/such.png", b""], ids=str)
def test_what_is_no_picture(source: Any) -> None:
    with pytest.raises(ImageError, match=r"found .*expected"):
        read(user_message([source], "x"))
