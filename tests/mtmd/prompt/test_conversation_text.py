"""What a template has no place for is written in another way, with a note, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from tool_templates import SPECIAL, STOPS

from mtmd.base.errors import PromptError
from mtmd.chat_template.render_limits import RenderLimitError
from mtmd.chat_template.template import ChatTemplate
from mtmd.prompt.conversation import read_conversation
from mtmd.prompt.conversation_text import ConversationText
from mtmd.prompt.rewritten_turns import DEVELOPER, SYSTEM_IN_PLACE, SYSTEM_IN_TURN, TURNS_JOINED
from mtmd.tools.history import BROKEN_ARGUMENTS, CALLS_WRITTEN, DESCRIBED, RESULTS_WRITTEN
from mtmd.tools.tool import Toolbox, read_toolbox

NOTHING = Toolbox()
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ALTERNATE = (  # Mistral, Gemma
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
SILENT = (  # leaves out what it does not know
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.role }}]{{ m.content }}"
    "{% endif %}{% endfor %}"
)
SYSTEM, USER = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}
REPLY = {"role": "assistant", "content": "yes"}


def write(
    source: str, *messages: Any, box: Toolbox = NOTHING, **more: Any
) -> tuple[str, tuple[str, ...]]:
    made = ConversationText(ChatTemplate(source, {}, "test").render, str, SPECIAL, STOPS, "<image>")
    conversation = read_conversation(messages, str)
    return made.write(list(conversation.messages), box, lambda prompt: prompt, **more)


@pytest.mark.parametrize(
    ("source", "messages", "expected", "note"),
    [
        (ALTERNATE, [SYSTEM, USER], "[user]be brief\n\nhello", SYSTEM_IN_TURN),
        (ALTERNATE, [SYSTEM], "[user]be brief", SYSTEM_IN_TURN),
        (ALTERNATE, [SYSTEM, REPLY, USER], "[user]be brief[assistant]yes[user]hello", SYSTEM_IN_TURN),
        (ALTERNATE, [USER, USER], "[user]hello\n\nhello", TURNS_JOINED),
        (ALTERNATE, [USER, REPLY, REPLY, USER], "[user]hello[assistant]yes\n\nyes[user]hello", TURNS_JOINED),
        (SILENT, [SYSTEM, USER], "[user]be brief\n\nhello", SYSTEM_IN_TURN),
        (
            SILENT.replace("('user'", "('system', 'user'"),
            [{**SYSTEM, "role": "developer"}, USER],
            "[system]be brief[user]hello",
            DEVELOPER,
        ),
        (
            "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
            "{{ raise_exception('first') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            [USER, SYSTEM],
            "[user]hello\n\nbe brief",
            SYSTEM_IN_PLACE,
        ),
    ],
)  # fmt: skip
def test_rearranged(source: str, messages: list[Any], expected: str, note: str) -> None:
    assert write(source, *messages) == (expected, (note,))


FIRST_ONLY = (  # Qwen3.5, and Mistral, whose turns alternate but for calls and results
    "{% set ns = namespace(n=0) %}{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{% endfor %}"
)
TOKENS_LEFT = "<system-reminder>\n<total_tokens>{} tokens left</total_tokens>\n</system-reminder>"


def turns_of_claude_code(results: int) -> list[dict[str, Any]]:
    """As Claude Code 2.1.332 sends them, shortened: a system message after every result."""
    environment = {"role": "system", "content": "# Environment"}
    made = [SYSTEM, {"role": "user", "content": "list the files"}, environment]
    for n in range(results):
        function = {"name": "Bash", "arguments": '{"command": "ls"}'}
        calls = [{"id": f"c{n}", "type": "function", "function": function}]
        made += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "tool_call_id": f"c{n}", "content": f"a{n}.txt"},
            {"role": "system", "content": TOKENS_LEFT.format(9 - n)},
        ]
    return made


@pytest.mark.parametrize("source", [CHATML, FIRST_ONLY, ALTERNATE, SILENT])
def test_what_an_agent_adds_leaves_the_beginning_of_the_prompt_as_it_was(source: str) -> None:
    before, _ = write(source, *turns_of_claude_code(1))
    after, notes = write(source, *turns_of_claude_code(2))
    assert after.startswith(before.removesuffix("<|im_start|>assistant\n"))
    assert "9 tokens left" in before and "8 tokens left" in after
    places = [
        after.index(text) for text in ("be brief", "list", "# Env", "a0.", ">9 ", "a1.", ">8 ")
    ]
    assert places == sorted(places)
    if source is FIRST_ONLY:
        assert notes == (SYSTEM_IN_PLACE,)


def test_what_fits_is_not_rearranged() -> None:
    assert write(CHATML, SYSTEM, USER)[1] == ()
    assert write(CHATML, SYSTEM)[0].startswith("<|im_start|>system\nbe brief<|im_end|>")


def test_a_refusal_is_in_the_templates_words() -> None:
    with pytest.raises(PromptError, match="the chat template refuses these messages: roles must"):
        write(ALTERNATE, REPLY, USER)


def test_a_text_without_a_place_is_refused_by_name() -> None:
    with pytest.raises(PromptError, match=r"leaves out .*message 1 \(narrator\): 'once'"):
        write(SILENT, {"role": "narrator", "content": "once"}, USER)


def called(arguments: str) -> list[Any]:
    function = {"name": "look", "arguments": arguments}
    return [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "a dog"},
        USER,
    ]


def test_tools_of_a_template_that_reads_strings_and_knows_none() -> None:
    prompt, notes = write(CHATML, *called('{"at": "left"}'))
    assert notes == (CALLS_WRITTEN, RESULTS_WRITTEN)
    assert '<tool_call>\n{"name": "look", "arguments": {"at": "left"}}\n</tool_call>' in prompt
    assert "user\n<tool_response>\na dog\n</tool_response>\nhello<|im_end|>" in prompt
    prompt, notes = write(SILENT, *called('{"at": "left"}'))
    assert notes == (CALLS_WRITTEN, RESULTS_WRITTEN)
    assert "[user]<tool_response>\na dog\n</tool_response>\nhello" in prompt


OBJECTS = (  # writes arguments as objects
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}"
    """{{ '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}"""
    """{{ c.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{% endfor %}"""
)
TEXTS = OBJECTS.replace("{{ c.function.arguments | tojson }}", "{{ c.function.arguments + '' }}")


@pytest.mark.parametrize("source", [OBJECTS, TEXTS], ids=["objects", "texts"])
@pytest.mark.parametrize("arguments", ['{"text": "This is a sh', "{", "[1]", "none"])
def test_a_call_that_was_cut_stays_what_the_model_wrote(source: str, arguments: str) -> None:
    prompt, notes = write(source, *called(arguments))
    assert f'"name": "look", "arguments": {arguments}}}\n</tool_call>' in prompt
    assert "[tool]a dog[user]hello" in prompt
    assert notes == (BROKEN_ARGUMENTS,)


def test_a_template_that_shows_either_a_text_or_calls() -> None:
    source = OBJECTS.replace(
        "{{ m.content }}", "{% if not m.tool_calls %}{{ m.content }}{% endif %}"
    )
    messages = called('{"at": "left"}')
    messages[1] = {**messages[1], "content": "I look."}
    prompt, notes = write(source, *messages)
    assert "I look.\n<tool_call>" in prompt and notes == (CALLS_WRITTEN,)


def test_an_open_end_in_a_template_of_parts() -> None:
    parts = "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %};{% endfor %}"
    assert write(parts, USER, REPLY, open_end=True)[0] == "[user]hello;[assistant]yes"


def test_further_variables_reach_the_template() -> None:
    source = CHATML + "{% if not enable_thinking %}<think></think>{% endif %}"
    assert write(source, USER, variables={"enable_thinking": True})[0].endswith("assistant\n")


LOOK = read_toolbox([{"type": "function", "function": {"name": "look", "parameters": {}}}])


def test_tools_of_a_template_without_system_messages() -> None:
    prompt, notes = write(ALTERNATE, USER, box=LOOK)
    assert notes == (DESCRIBED, SYSTEM_IN_TURN)
    assert prompt.startswith("[user]# Tools") and prompt.endswith("\n\nhello")


def test_a_template_that_reads_a_list_of_tools_where_there_are_none() -> None:
    lists = "{% for tool in tools %}<tool>{{ tool | tojson }}</tool>{% endfor %}" + CHATML
    assert write(lists, USER) == write(CHATML, USER)
    assert write(lists, USER, box=LOOK)[0].startswith('<tool>{"type": "function"')


def test_tools_that_the_template_refuses_are_described() -> None:
    refuses = (
        CHATML + "{% for t in tools or [] %}{{ t.function.parameters.properties.x.y }}{% endfor %}"
    )
    prompt, notes = write(refuses, USER, box=LOOK)
    assert notes == (DESCRIBED,) and '"name": "look"' in prompt


def test_variables_may_have_any_name() -> None:
    variables = {"self": 1, "render": 2, "forms": 3}
    source = CHATML + "{{ self_ }}{{ render }}{{ forms }}"
    assert write(source, USER, variables=variables)[0].endswith("assistant\n23")


def test_many_turns_of_one_role_become_one() -> None:
    prompt, notes = write(ALTERNATE, *[{"role": "user", "content": str(n)} for n in range(3000)])
    assert prompt == "[user]" + "\n\n".join(map(str, range(3000))) and notes == (TURNS_JOINED,)


def test_messages_that_are_too_long_are_not_tried_in_other_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = ConversationText(ChatTemplate(ALTERNATE, {}, "test").render, str)
    renders = list[int]()

    def render(messages: Any, **_: Any) -> str:
        renders.append(len(messages))
        raise RenderLimitError("messages of 100,000 characters make test ask for too much")

    assert made.forms.of("user").text
    monkeypatch.setattr(made, "_render", render)
    with pytest.raises(PromptError, match="messages of 100,000 characters") as caught:
        made.write([USER, USER], NOTHING, str)
    assert type(caught.value) is PromptError and renders == [2]
