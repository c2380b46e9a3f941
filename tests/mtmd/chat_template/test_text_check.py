"""Every text that was sent stands in the prompt, or the request is refused."""

from __future__ import annotations

from typing import Any

import pytest

from mtmd.base.errors import PromptError
from mtmd.chat_template.template import ChatTemplate
from mtmd.chat_template.text_check import CHANGED, REPEATED, THOUGHTS_LEFT_OUT, check_texts

USER = {"role": "user", "content": "What is it?"}
ANSWER = {"role": "assistant", "content": "A dog."}


def check(source: str, *messages: Any) -> tuple[str, tuple[str, ...]]:
    return check_texts(ChatTemplate(source, {}, "test").render, messages)


PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"


@pytest.mark.parametrize(
    "content", ["x", "  a b \n", "<think>", "[INST]", "ab", "", " \n", "\ufdd3\ufdd8"]
)
def test_the_prompt_is_the_templates_own(content: str) -> None:
    message = {"role": "user", "content": content}
    assert check(PLAIN, message, USER) == (f"[user]{content.strip()}[user]What is it?", ())


def test_a_text_that_is_left_out_is_named() -> None:
    last = "{{ messages[-1].content }}"
    with pytest.raises(PromptError) as caught:
        check(last, {"role": "system", "content": "be brief"}, USER)
    assert str(caught.value) == (
        "the chat template leaves out a text that was sent: message 1 (system): 'be brief'; use "
        "another chat template (--chat-template), or send the text in a message of another role"
    )


def test_a_short_text_is_not_found_by_chance() -> None:
    with pytest.raises(PromptError, match=r"message 1 \(user\): 'a'"):
        check("assistant: {{ messages[1].content }}", {"role": "user", "content": "a"}, ANSWER)


def test_a_text_that_is_cut_is_missing() -> None:
    with pytest.raises(PromptError, match=r"message 1 \(user\): 'What is it\?'"):
        check("{{ messages[0].content[:6] }}", USER)


def test_parts_that_are_printed_are_not_read() -> None:
    parts = [{"type": "text", "text": "hello"}]
    for source in (PLAIN, "{{ messages[0].content | tojson }}"):
        with pytest.raises(PromptError, match="prints parts of a message as data"):
            check(source, {"role": "user", "content": parts})


THINKING = (  # Qwen 3: thoughts of earlier answers are left out
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endfor %}"
)


def test_thoughts_of_earlier_answers_may_be_left_out() -> None:
    thought = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA dog."}
    prompt, notes = check(THINKING, USER, thought, USER)
    assert prompt == "[user]What is it?[assistant]A dog.[user]What is it?"
    assert notes == (THOUGHTS_LEFT_OUT,)
    field = {"role": "assistant", "content": "A dog.", "reasoning_content": "hm"}
    assert check(PLAIN, USER, field, USER)[1] == (THOUGHTS_LEFT_OUT,)
    assert (
        check(PLAIN.replace("m.content", "(m.reasoning_content or '') + m.content"), field)[1] == ()
    )
    with pytest.raises(PromptError, match=r"message 1 \(user\)"):  # of the user nothing may go
        check(THINKING, {"role": "user", "content": "about </think> tags"})


LOOKS = (  # writes other prompts for texts that begin in some way
    "{% for m in messages %}{% if m.content.startswith('<tool_response>') %}(result){% endif %}"
    "{{ m.content.replace('<tool_response>', '<r>') }}{% endfor %}"
)


def test_a_template_that_looks_into_texts_is_searched() -> None:
    result = {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
    assert check(LOOKS, USER, result)[1] == ()
    gone = LOOKS.replace(
        "{{ m.content.replace(", "{{ 'x' if m.content.startswith('<') else m.content.replace("
    )
    with pytest.raises(PromptError, match="message 2"):
        check(gone, USER, result)


def test_a_text_that_stands_twice_is_noted() -> None:
    assert check("{{ messages[0].content }} {{ messages[0].content }}", USER)[1] == (REPEATED,)


CALLS = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"


def test_calls_are_checked_by_name_and_texts() -> None:
    function = {"name": "look", "arguments": {"at": 'the "left"', "n": 3}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
    prompt, notes = check(CALLS, USER, call)
    assert notes == () and '"at": "the \\"left\\""' in prompt
    with pytest.raises(PromptError, match=r"message 2 \(assistant\): 'look'"):
        check(PLAIN, USER, call)
    # a name may stand with the result as well
    assert check(CALLS + "{{ messages[1].tool_calls[0].function.name }}", USER, call)[1] == ()


def called(arguments: Any) -> dict[str, Any]:
    function = {"name": "send", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}


@pytest.mark.parametrize("text", ["hello there", '"quoted"', "\nx", "a"])
def test_an_argument_called_text_is_no_part(text: str) -> None:
    for source in (CALLS, CALLS.replace("c.function | tojson", "c.function")):
        assert check(source, USER, called({"text": text}))[1] == ()


def test_texts_inside_arguments_are_checked() -> None:
    nested = called({"list": [{"deep": "left out"}], "n": 1})
    assert check(CALLS, nested)[1] == ()
    with pytest.raises(PromptError, match=r"message 1 \(assistant\): 'left out'"):
        check("{{ messages[0].tool_calls[0].function.name }}", nested)


def test_a_text_that_is_changed_in_the_middle_is_noted() -> None:
    message = {"role": "user", "content": "one secret two"}
    for removed, expected in (
        ("secret", (f"{CHANGED}: message 1 (user): 'one secret two'",)),
        ("x", ()),
    ):
        assert (
            check(f"{{{{ messages[0].content | replace('{removed}', '') }}}}", message)[1]
            == expected
        )
    lines = {"role": "user", "content": "one\n  two\n three"}
    assert check("{{ messages[0].content | replace('\n', ' ') | tojson }}", lines)[1] == ()


def test_an_answer_that_is_cut_and_had_no_thought_is_refused() -> None:
    with pytest.raises(PromptError, match="message 1"):
        check("{{ messages[0].content.split('|')[-1] }}", {"role": "assistant", "content": "a|b|c"})
