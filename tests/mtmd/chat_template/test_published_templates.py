"""Published chat templates, as their authors ship them: what is sent stands in the prompt, in
transformers' own rendering where the template has a place for it.

They lie beside the repository, in `../shared/templates`; where they do not, these tests are skipped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mtmd.base.errors import PromptError
from mtmd.chat_template.template import ChatTemplate
from mtmd.prompt.conversation import read_conversation
from mtmd.prompt.conversation_text import ConversationText
from mtmd.tools.tool import Toolbox, read_toolbox

TEMPLATES = Path(__file__).parents[4] / "shared" / "templates"
pytestmark = pytest.mark.skipif(
    not TEMPLATES.is_dir(),
    reason="PUBLISHED TEMPLATES ARE MISSING: there is no ../shared/templates",
)
NAMES = sorted(path.name for path in TEMPLATES.glob("*.jinja"))
SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>"}
STOPS = ("<|im_end|>", "<|eot_id|>", "</s>")
MARKERS = ("<|image_pad|>", "<|image|>", "[IMG]", "<|image_soft_token|>", "<start_of_image>")
PICTURE = np.zeros((4, 4, 3), np.uint8)
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Finds a word",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
ASK, MORE, RULE = "Alpha one?", "Beta two?", "Gamma rule."
REPLY, RESULT, WORD = "Delta reply.", "Epsilon result.", "zeta"


def stated(role: str, *texts: str, parts: bool = True) -> dict[str, Any]:
    content = [{"type": "text", "text": text} for text in texts]
    return {"role": role, "content": content if parts else texts[0]}


def text(role: str, words: str) -> dict[str, Any]:
    return stated(role, words, parts=False)


CALL = {"id": "call00001", "type": "function"}
CALL |= {"function": {"name": "look_up", "arguments": {"word": WORD}}}
SHOWN: Any = {"type": "image", "image": PICTURE}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "a text": [text("user", ASK)],
    "a part": [stated("user", ASK)],
    "two parts": [stated("user", ASK, MORE)],
    "a system text": [text("system", RULE), text("user", ASK)],
    "a system part": [stated("system", RULE), stated("user", ASK)],
    "turns": [text("user", ASK), text("assistant", REPLY), text("user", MORE)],
    "turns in parts": [stated("user", ASK), stated("assistant", REPLY), stated("user", MORE)],
    "a call and its result": [
        text("user", ASK),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "name": "look_up", "content": RESULT},
    ],
    "a picture": [{"role": "user", "content": [SHOWN, {"type": "text", "text": ASK}]}],
}
# What templates refuse in every form, in their own words or by jinja2's: they need a variable that
# no interface has.
REFUSED = {("fireworks-ai-llama-3-firefunction-v2.jinja", name) for name in CONVERSATIONS}


@lru_cache
def writer(name: str) -> tuple[ConversationText, str]:
    source = (TEMPLATES / name).read_text()
    marker = next((m for m in MARKERS if m in source), "<image>")
    template = ChatTemplate(source, SPECIAL, name)
    return ConversationText(template.render, str, STOPS, STOPS[:1], marker), marker


def written(name: str, case: str) -> tuple[str, tuple[str, ...]]:
    made, marker = writer(name)
    conversation = read_conversation(CONVERSATIONS[case], str)
    box = read_toolbox([TOOL]) if case.startswith("a call") else Toolbox()

    def read(prompt: str) -> str:
        if prompt.count(marker) != len(conversation.pictures):
            raise PromptError("a picture has no place")
        return prompt

    return made.write(list(conversation.messages), box, read)


def texts(messages: list[dict[str, Any]]) -> list[str]:
    known = json.dumps(messages, default=str)
    return [t for t in (ASK, MORE, RULE, REPLY, RESULT, WORD, "look_up") if t in known]


@pytest.mark.parametrize("name", NAMES)
def test_every_text_stands_in_the_prompt(name: str) -> None:
    for case, messages in CONVERSATIONS.items():
        if (name, case) in REFUSED:
            with pytest.raises(PromptError, match=re.escape(name)):
                written(name, case)
            continue
        prompt, _ = written(name, case)
        for sent in texts(messages):
            count = prompt.count(sent)
            assert count == 1 or (sent == "look_up" and count > 1), case
        assert "'text'" not in prompt and '"text"' not in prompt, case


def strings(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    joined = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    return {**message, "content": joined}


def parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message["content"]
    return stated(message["role"], content) if isinstance(content, str) and content else message


@pytest.mark.parametrize("name", NAMES)
def test_the_prompt_is_that_of_transformers(name: str) -> None:
    """In the form that the template reads: that in which transformers' own prompt has all texts."""
    for case in CONVERSATIONS:
        if case == "a picture" or (name, case) in REFUSED:
            continue
        prompt, notes = written(name, case)
        if notes:  # there is no place for something: changed, and said so
            continue
        prompts = [theirs(name, case, form) for form in (lambda m: m, strings, parts)]
        prompts = [other for other in prompts if other is not None]
        assert ((name, case) in TEXT_ARGUMENTS) != (prompt in prompts), case


# transformers gives arguments of calls as objects, we give them to these templates as JSON text:
# the first reads nothing else, the second both, and the text in the form that calls are read in.
TEXT_ARGUMENTS = {
    (f"{name}.jinja", "a call and its result")
    for name in ("meetkai-functionary-medium-v3.2", "Kimi-K3")
}


def theirs(name: str, case: str, form: Callable[[dict[str, Any]], dict[str, Any]]) -> str | None:
    messages = [form(message) for message in CONVERSATIONS[case]]
    try:
        result, _ = render_jinja_template(
            [messages],
            tools=[TOOL] if case.startswith("a call") else None,
            chat_template=(TEMPLATES / name).read_text(),
            add_generation_prompt=True,
            **SPECIAL,
        )
    except Exception:  # whatever a template raises for a form that it does not read
        return None
    whole = all(sent in result[0] for sent in texts(CONVERSATIONS[case]))
    return result[0] if whole else None


def test_how_many_are_right() -> None:
    """Of all conversations in all templates: as they are, with a note, refused."""
    counts = {"right": 0, "with a note": 0, "refused": 0}
    for name in NAMES:
        for case in CONVERSATIONS:
            try:
                notes = written(name, case)[1]
                counts["with a note" if notes else "right"] += 1
            except PromptError:
                counts["refused"] += 1
    print(counts)
    assert counts["refused"] == len(REFUSED)
    assert counts["with a note"] <= 12
