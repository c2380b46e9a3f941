"""What the options that clients send do to the answers of a real model."""

from __future__ import annotations

import json
import re

import pytest

from mtmd import PromptError, RawPrompt, ToolCallPiece, gather
from mtmd.base.errors import OptionError
from mtmd.service import request_maker
from mtmd.service.service import Service

ASK = [{"role": "user", "content": "How many circles are there?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {
                    "colour": {"type": "string", "enum": ["red", "blue"]},
                    "count": {"type": "integer", "minimum": 1, "maximum": 9},
                },
                "required": ["colour", "count"],
            },
        },
    }
]


@pytest.fixture(scope="module")
def service(demo):
    service = Service(demo)
    yield service
    service.close()


def answer(service, messages=ASK, **chosen):
    *_, last = service.submit(messages, **{"max_tokens": 12, **chosen})
    return last.answer


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_a_forced_call_has_arguments_that_fit(service, choice):
    events = list(service.submit(ASK, tools=TOOLS, tool_choice=choice, max_tokens=120))
    (call,) = events[-1].answer.tool_calls
    result = json.loads(call.arguments)
    assert result["colour"] in ("red", "blue") and 1 <= result["count"] <= 9 and len(result) == 2
    pieces = [e for e in events if isinstance(e, ToolCallPiece)]
    assert (pieces[0].id, pieces[0].name) == (call.id, "look")
    assert "".join(p.arguments for p in pieces) == call.arguments
    receipt = events[-1].answer.receipt
    assert (receipt.finish, events[-1].answer.text) == ("tool_calls", "")
    assert any("chat template cannot show the tools" in warning for warning in receipt.warnings)


def test_a_model_that_wants_to_call_nothing_answers(service):
    assert answer(service, tools=TOOLS).tool_calls == ()
    none = answer(service, tools=TOOLS, tool_choice="none")
    assert none.prompt_token_ids == answer(service).prompt_token_ids


def test_several_answers_read_their_prompt_once(service):
    long = [{"role": "user", "content": "How many circles are there? " * 12}]
    tickets = service.submit_several(long, 3, temperature=1.0, seed=7, max_tokens=8)
    answers = {i: e.answer for i, e in gather(tickets) if hasattr(e, "answer")}
    assert [answers[i].receipt.seed for i in range(3)] == [7, 8, 9]
    known = [answers[i].receipt.reused_tokens for i in range(3)]
    prompt = answers[0].receipt.prompt_tokens
    assert known[0] < 32 and min(known[1:]) >= prompt - 33
    for i in range(3):
        alone = answer(service, long, temperature=1.0, seed=7 + i, max_tokens=8)
        assert alone.output_token_ids == answers[i].output_token_ids


def test_several_answers_have_one_plan_of_calls(service, monkeypatch):
    """Whatever time its trials take, they are those of one request."""
    made, plan_calls = [], request_maker.plan_calls
    monkeypatch.setattr(
        request_maker, "plan_calls", lambda *args: made.append(plan_calls(*args)) or made[-1]
    )
    tickets = service.submit_several(ASK, 3, tools=TOOLS, tool_choice="required", max_tokens=120)
    answers = [e.answer for _, e in gather(tickets) if hasattr(e, "answer")]
    assert [[call.name for call in one.tool_calls] for one in answers] == [["look"]] * 3
    assert len({call.id for one in answers for call in one.tool_calls}) == 3 and len(made) == 1


def test_tokens_can_be_forbidden_and_wanted(service):
    first = answer(service).output_token_ids[0]
    assert answer(service, logit_bias={first: -100}).output_token_ids[0] != first
    assert set(answer(service, logit_bias={300: 100}, max_tokens=4).output_token_ids) == {300}
    with pytest.raises(OptionError, match="logit_bias: found token 99999"):
        answer(service, logit_bias={99999: 1})


def test_an_answer_ends_not_before_and_where_it_is_to(service):
    plain = answer(service, max_tokens=40)
    assert plain.receipt.finish == "stop"
    longer = answer(service, max_tokens=40, min_tokens=len(plain.output_token_ids) + 3)
    assert len(longer.output_token_ids) >= len(plain.output_token_ids) + 3
    ended = answer(service, stop_token_ids=[plain.output_token_ids[0]])
    assert (ended.output_token_ids, ended.receipt.finish) == ((), "stop")
    read = answer(service, max_tokens=0)
    assert (read.text, read.receipt.output_tokens, read.receipt.finish) == ("", 0, "length")


def test_an_answer_goes_on_from_what_is_given(service):
    whole = answer(service, max_tokens=40).text
    begun = [*ASK, {"role": "assistant", "content": "I see"}]
    assert whole.startswith("I see ")
    rest = answer(service, begun, continue_final_message=True, max_tokens=40).text
    assert f"I see{rest}" == whole
    with pytest.raises(PromptError, match="continue_final_message"):
        answer(service, continue_final_message=True)


@pytest.mark.parametrize(
    "grammar, pattern",
    [
        ({"choice": ["red and blue", "green"]}, "red and blue|green"),
        ({"regex": "^[a-c]{2}/[0-9]$"}, "[a-c]{2}/[0-9]"),
        ('root ::= "<" word ">"\nword ::= [a-z] [a-z]', "<[a-z]{2}>"),
        ('start: "x" NUMBER\nNUMBER: /[0-9]{3}/', "x[0-9]{3}"),
    ],
    ids=["choice", "regex", "gbnf", "lark"],
)
def test_answers_follow_grammars(service, grammar, pattern):
    assert re.fullmatch(pattern, answer(service, grammar=grammar, max_tokens=30).text)


@pytest.mark.parametrize(
    "grammar, text",
    [
        (r'root ::= "\x41\u00e9\U0001F600\u0022\x5c\u000a"', 'Aé😀"\\\n'),
        (
            r"root ::= [\u00E9] [\U0001F600-\U0001F601] [\xe8-\xea] [^\u0000-\u0060\x62-\U0010FFFF]",
            None,
        ),
        (r"root ::= [\x2d\x5d] [\u005b] [\u005e\u005E]", None),
        ('root ::= "a" # \\uD800 "\nroot2 ::= [b]', "a"),
    ],
)
def test_escapes_of_gbnf_are_code_points(service, grammar, text):
    """As llama.cpp documents them, in texts and in classes."""
    result = answer(service, grammar=grammar, max_tokens=30).text
    if text is not None:
        assert result == text
    elif "2d" in grammar:
        assert result in ("-[^", "][^")
    else:
        assert re.fullmatch("é[😀😁][èéê]a", result)


@pytest.mark.parametrize("escape", [r"\ud83d", r"\U00110000", r"\UFFFFFFFF"])
def test_escapes_of_gbnf_that_are_no_character(service, escape):
    for grammar in (f'root ::= "{escape}"', f"root ::= [{escape}]"):
        with pytest.raises(OptionError, match=r"^grammar: found \\[uU][\da-fA-F]+, which is no"):
            answer(service, grammar=grammar)


@pytest.mark.parametrize("start", ['"', "[", "[\\", '"\\', "#", '"a"[', "\\u"])
def test_long_gbnf_without_an_end_is_refused_in_time(start):
    """Quadratic work on a mebibyte would take hours."""
    from mtmd.llm.sampling.grammar_notations import grammar_source

    with pytest.raises(OptionError):
        grammar_source({"gbnf": (start * (1 << 20))[: 1 << 20]})


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a', {"regex": "(a"}, {"choice": []}, {"lark": "start: nowhere"}, {"x": 1}, "("],
    ids=str,
)
def test_grammars_that_cannot_be_followed(service, grammar):
    with pytest.raises(OptionError, match=r"^grammar: "):
        answer(service, grammar=grammar)


def test_plain_prompts(service):
    tokens = answer(service).prompt_token_ids
    assert answer(service, RawPrompt(tokens)).output_token_ids == answer(service).output_token_ids
    assert answer(service, RawPrompt("a b")).receipt.prompt_tokens < 8
    for wrong in (RawPrompt(""), RawPrompt((10**6,)), RawPrompt((-1,))):
        with pytest.raises(PromptError):
            answer(service, wrong)


def test_system_messages_and_pictures_find_a_place(service):
    import numpy as np

    red = np.full((32, 32, 3), (255, 0, 0), np.uint8)
    picture = {"role": "system", "content": [{"type": "image", "image": red}]}
    result = answer(service, [picture, *ASK])
    assert len(result.receipt.images) == 1
    assert any("system message" in warning for warning in result.receipt.warnings)
    system = {"role": "system", "content": "Be short."}
    assert answer(service, [system, system, *ASK]).receipt.output_tokens
    assert answer(service, [*ASK, {"role": "assistant", "content": "two"}, system, *ASK])
    shown = [{"role": "user", "content": [{"type": "image", "image": red}]}]
    assert len(answer(service, shown).receipt.images) == 1
