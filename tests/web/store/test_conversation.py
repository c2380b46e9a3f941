"""What follows from a conversation's messages alone."""

from __future__ import annotations

import pytest

from mtmd.web.store.conversation import StoredImage, title_from


@pytest.mark.parametrize(
    ("text", "names", "title"),
    [
        ("what  is\n\nit?", (), "what is it?"),
        ("what is it?", ("cat.png",), "what is it?"),
        ("x" * 60, (), "x" * 60),
        ("x" * 61, (), "x" * 59 + "…"),
        ("word " * 20, (), "word " * 11 + "word…"),
        (" \n", ("cat.png", "dog.png"), "cat.png"),
        ("", ("",), "Picture"),
        ("", (), "Picture"),
    ],
)
def test_a_title_is_the_beginning_of_the_text_or_the_name_of_a_picture(
    text: str, names: tuple[str, ...], title: str
) -> None:
    images = [StoredImage("0" * 64, "image/png", 1, 1, 1, name) for name in names]
    assert title_from(text, images) == title
