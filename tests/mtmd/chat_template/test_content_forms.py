"""In which form a template reads contents is found out by rendering, and messages take that form.

The templates are written after the manner of published ones.
"""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.chat_template.content_forms import ContentForms, RoleForm, read_forms
from mtmd.chat_template.template import ChatTemplate

STRINGS = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '\n' }}{% endfor %}"
PARTS = (  # SmolVLM, Idefics 3
    "{% for m in messages %}<|{{ m.role }}|>{% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}\n{% endfor %}"
)
EITHER = (  # Qwen 2.5 VL
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}"
)
PRINTED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}\n{% endfor %}"  # Llama 3
EMPTIED = (  # Qwen 3
    "{% for m in messages %}{% if m.content is string %}{% set c = m.content %}{% else %}"
    "{% set c = '' %}{% endif %}<|{{ m.role }}|>{{ c }}\n{% endfor %}"
)
FIRST_PART = (  # Mistral Small 3.1: the system text is that of the first part
    "{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content[0]['text'] }}\n"
    "{% else %}<|{{ m.role }}|>{{ m.content }}\n{% endif %}{% endfor %}"
)
NO_SYSTEM = (  # Gemma
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    + STRINGS
)
UNMARKED = (  # dots.ocr: a list of the user's parts has no mark of its turn
    "{% for m in messages %}{% if m.role != 'user' or m.content is string %}"
    "{{ '<|' + m.role + '|>' + m.content }}{% else %} {% for p in m.content %}"
    "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}<|assistant|>"
)
STRING, LIST, BOTH = RoleForm(), RoleForm(False, True, True), RoleForm(True, True, True)


def forms(source: str, marker: str | None = "<image>") -> ContentForms:
    return read_forms(ChatTemplate(source, {}, "test").render, marker)


def pictured(form: RoleForm) -> RoleForm:
    return RoleForm(form.text, form.parts, form.several, True)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (STRINGS, {"user": STRING, "system": STRING, "assistant": STRING}),
        (PARTS, {"user": pictured(LIST), "system": pictured(LIST), "assistant": LIST}),
        (EITHER, {"user": pictured(BOTH), "system": pictured(BOTH), "assistant": BOTH}),
        (PRINTED, {"user": STRING, "system": STRING, "assistant": STRING}),
        (EMPTIED, {"user": STRING, "system": STRING, "assistant": STRING}),
        (FIRST_PART, {"user": STRING, "system": RoleForm(False, True), "assistant": STRING}),
        (NO_SYSTEM, {"user": STRING, "assistant": STRING}),
        (UNMARKED, {"user": STRING, "system": STRING, "assistant": STRING}),
    ],
    ids=["strings", "parts", "either", "printed", "emptied", "first part", "no system", "unmarked"],
)
def test_the_form_of_each_role(source: str, expected: dict[str, RoleForm]) -> None:
    actual = dict(forms(source).roles)
    assert {role: actual.get(role) for role in ("user", "system", "assistant")} == {
        "user": None, "system": None, "assistant": None, **expected
    }  # fmt: skip


def test_a_template_of_a_model_without_pictures_shows_none() -> None:
    assert forms(EITHER, marker=None).of("user") == BOTH


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": t} for t in texts]


@pytest.mark.parametrize(
    ("source", "content", "expected"),
    [
        (STRINGS, "a", "a"),
        (STRINGS, text("a"), "a"),
        (STRINGS, text("a", "", "b"), "a\nb"),
        (STRINGS, [{"type": "image"}, *text("a")], "<image>\na"),
        (STRINGS, [], ""),
        (PARTS, "a", text("a")),
        (PARTS, "", ""),
        (PARTS, text("a", "b"), text("a", "b")),
        (PARTS, [{"type": "image"}, *text("a")], [{"type": "image"}, *text("a")]),
        (EITHER, "a", "a"),
        (EITHER, text("a"), text("a")),
        (PRINTED, text("a", "b"), "a\nb"),
        (EMPTIED, text("a"), "a"),
    ],
)
def test_a_content_takes_the_form_that_is_read(source: str, content: Any, expected: Any) -> None:
    (message,) = forms(source).fit([{"role": "user", "content": content}])
    assert message == {"role": "user", "content": expected}


def test_what_stands_around_a_picture_in_a_string() -> None:
    render = ChatTemplate(STRINGS, {}, "test").render
    made = read_forms(render, "<pad>", "<s><pad></s>", "<v>")
    content = [{"type": "image"}, *text("a"), {"type": "video"}]
    assert made.fit([{"role": "user", "content": content}]) == [
        {"role": "user", "content": "<s><pad></s>\na\n<v>"}
    ]


def test_pictures_in_a_line_with_the_text_beside_them() -> None:
    render = ChatTemplate(STRINGS, {}, "test").render
    made = read_forms(render, "<pad>", "<s><pad></s>", in_line=True)
    image = {"type": "image"}
    content = [*text("a", "b"), image, image, *text("c", "", "d")]
    assert made.fit([{"role": "user", "content": content}]) == [
        {"role": "user", "content": "a\nb<s><pad></s><s><pad></s>c\nd"}
    ]


def test_texts_become_one_where_the_first_part_alone_is_read() -> None:
    (system,) = forms(FIRST_PART).fit([{"role": "system", "content": text("a", "b")}])
    assert system["content"] == text("a\nb")


def test_a_template_that_shows_audio_and_no_text() -> None:
    source = (  # Qwen3-ASR
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
        "{% for m in messages if m.content is not string %}"
        "{% for p in m.content if p.type == 'audio' %}<audio>{% endfor %}{% endfor %}"
    )
    made = read_forms(ChatTemplate(source, {}, "test").render, audio="<audio>")
    assert made.roles == {"user": RoleForm(False, audio=True), "system": RoleForm(audio=True)}
