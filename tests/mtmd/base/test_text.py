from __future__ import annotations

import pytest

from mtmd.base.text import for_terminal

BAD = "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain\n\ttext", "plain\n\ttext"),
        ("\x1b[2J\x1b]0;title\x07", f"{BAD}[2J{BAD}]0;title{BAD}"),
        ("\x9b31m and\rback\x08\x7f\x00", f"{BAD}31m and{BAD}back{BAD}{BAD}{BAD}"),
        ("half \ud83d of a pair", f"half {BAD} of a pair"),
        ("\u202eelif\u2069", f"{BAD}elif{BAD}"),
    ],
)
def test_what_a_terminal_would_obey_is_replaced(text: str, expected: str) -> None:
    assert for_terminal(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "👩\u200d👩\u200d👧 ❤\ufe0f",
        "می\u200cخواهم",
        "10\u202f000\u00a0€",
        "日本\u3000語",
        "\u200fعربي",
    ],
)
def test_characters_that_texts_need_stay(text: str) -> None:
    assert for_terminal(text) == text
