"""The thought of an answer is a part of its own: split, counted, closed after a budget, and over
before anything that is prescribed for the answer begins.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import patch

import pytest
from scripted import writes
from thinking_templates import TEMPLATES

from mtmd import Finished, OptionError, PromptError, TextPiece, ThinkingPiece, load
from mtmd.chat_template.text_check import THOUGHTS_LEFT_OUT
from mtmd.llm.tokenizer.text_stream import TextStream
from mtmd.thinking.switches import CLOSED, NO_MARKS

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["q"]}},
    "required": ["a"],
    "additionalProperties": False,
}
# Marks that are special tokens of the demo model, which would give no text by themselves.
SPECIAL = TEMPLATES["written"].replace("<think>", "<pad>").replace("</think>", "<unk>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string"}},
                "required": ["at"],
            },
        },
    }
]
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "b"}}\n</tool_call>'


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The demo model with each template, loaded when it is first needed."""
    made = {}

    def model(kind):
        if kind not in made:
            path = tmp_path_factory.mktemp("templates") / "chat.jinja"
            path.write_text(SPECIAL if kind == "special" else TEMPLATES[kind])
            made[kind] = load(chat_template=path, context=1024)
        return made[kind]

    yield model


def prompt_of(model, answer):
    return model.service.spelling_of(answer.prompt_token_ids)


WRITTEN = [
    ("opened", "Hm.\n</think>\n\nHello."),
    ("written", "<think>\nHm.\n</think>\n\nHello."),
    ("line", "\n<think>Hm.</think>\nHello."),
    ("stripped", "Hm.\n</think>\n\nHello."),
    ("special", "<pad>\nHm.\n<unk>\n\nHello."),
    (
        "channels",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello.",
    ),
    ("words", "Hm.\n[BEGIN FINAL RESPONSE]\nHello."),
    ("parts", "[THINK]Hm.[/THINK]Hello."),
]


@pytest.mark.parametrize(("kind", "text"), WRITTEN)
def test_thought_and_answer_come_as_events_and_fields_of_their_own(models, kind, text):
    model = models(kind)
    with writes(model, text):
        *events, last = model.stream(HI, logprobs=0)
    answer = last.answer
    assert (answer.thinking, answer.text, answer.receipt.finish) == ("Hm.", "Hello.", "stop")
    assert "".join(e.text for e in events if isinstance(e, ThinkingPiece)) == "Hm."
    assert "".join(e.text for e in events if isinstance(e, TextPiece)) == "Hello."
    infos = [i for e in events if isinstance(e, (ThinkingPiece, TextPiece)) for i in e.tokens]
    assert tuple(infos) == answer.logprobs
    assert [i.id for i in infos] == list(answer.output_token_ids)
    shown = [i for e in events if isinstance(e, TextPiece) for i in e.tokens]
    assert "".join(i.text for i in shown).strip() == "Hello."
    thought = answer.receipt.thinking_tokens
    assert thought == len(infos) - len(shown) > 2
    assert answer.asdict()["thinking"] == "Hm."
    assert "<summary>thought</summary>" in answer._repr_html_() and "Hm." in answer._repr_html_()
    assert f"{thought} of them thought" in str(answer.receipt)


@pytest.mark.parametrize("kind", ["opened", "written", "silent"])
def test_an_answer_without_a_thought_is_what_it_was(models, kind):
    model = models(kind)
    with writes(model, "Hello."):
        answer = model.answer(messages=HI, think=None if kind == "silent" else False)
    assert (answer.thinking, answer.text, answer.receipt.thinking_tokens) == ("", "Hello.", 0)
    assert "thinking" not in answer.asdict()
    assert "thought" not in str(answer.receipt)


def test_a_thought_that_is_cut_is_no_answer(models):
    model = models("opened")
    with writes(model, "I wonder and wonder"):
        answer = model.answer(messages=HI, max_tokens=4)
    assert answer.text == "" and answer.thinking and answer.receipt.finish == "length"
    assert "cut within its thought" in answer.receipt.warnings[-1]
    with writes(model, "I wonder"):
        answer = model.answer(messages=HI)
    assert (answer.thinking, answer.text, answer.receipt.finish) == ("I wonder", "", "stop")
    with writes(model, "Hm </thi"):
        assert model.answer(messages=HI).thinking == "Hm </thi"


@pytest.mark.parametrize(
    ("kind", "mark"), [("opened", ""), ("written", "<think>\n"), ("special", "<pad>")]
)
@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "drawn"])
def test_a_budget_closes_the_thought_by_its_own_mark(models, kind, mark, drawn):
    model = models(kind)
    tokens = model.loaded.checkpoint.tokenizer.encode(f"{mark}one two three four five six")
    begins = len(model.loaded.checkpoint.tokenizer.encode(mark.rstrip()))
    with writes(model, f"{mark}one two three four five six"):
        answer = model.answer(messages=HI, think_budget=4, max_tokens=40, logprobs=0, **drawn)
    closing = model.prompts.thinking_template.marks.closing
    forced = model.loaded.checkpoint.tokenizer.encode(closing)
    spent = list(answer.output_token_ids[begins:])
    at = next(i for i in range(len(spent)) if spent[i : i + len(forced)] == forced)
    assert at == 4 and spent[:at] == tokens[begins : begins + 4]
    assert answer.receipt.thinking_tokens == begins + 4 + len(forced)
    assert "one two three four five six".startswith(answer.thinking) and answer.thinking
    assert answer.text and answer.receipt.finish == "stop"
    assert len(answer.logprobs) == len(answer.output_token_ids)


@pytest.mark.parametrize("kind", ["opened", "written", "special"])
def test_a_thought_that_repeats_itself_is_closed_and_the_answer_follows(models, kind):
    """After the script the model writes what it would by itself, as behind a budget."""
    model = models(kind)
    opening = {"opened": "", "written": "<think>\n", "special": "<pad>\n"}[kind]
    with writes(model, opening + "one two three " * 120):
        answer = model.answer(messages=HI, max_tokens=400, stop_repeating=True)
    assert answer.thinking.startswith("one two three one two three")
    assert 96 <= answer.receipt.thinking_tokens < 200 and answer.text
    closed = "the thought said the same again and again, so it was closed (stop_repeating)"
    assert closed in answer.receipt.warnings
    with writes(model, opening + "one two three " * 120):
        answer = model.answer(messages=HI, max_tokens=400)
    assert answer.receipt.thinking_tokens > 200 and closed not in answer.receipt.warnings


@pytest.mark.parametrize("drawn", [{}, {"temperature": 1.0, "seed": 5}], ids=["greedy", "drawn"])
def test_speculation_and_other_answers_change_nothing(tmp_path, drawn):
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATES["opened"])
    text = "Count: one two three, one two three, one two three, one two"
    requested = [{"role": "user", "content": text}]
    settings = dict(max_tokens=60, think_budget=12, min_tokens=4, **drawn)
    answers = []
    for speculate in ("off", 6):
        model = load(chat_template=path, context=1024, speculate=speculate, parallel=3)
        alone = model.answer(messages=requested, **settings)
        with ThreadPoolExecutor(3) as pool:
            together = list(
                pool.map(lambda _: model.answer(messages=requested, **settings), range(3))  # noqa: B023
            )
        assert {a.output_token_ids for a in together} == {alone.output_token_ids}
        assert {a.receipt.thinking_tokens for a in together} == {alone.receipt.thinking_tokens}
        answers.append(alone)
    assert answers[0].output_token_ids == answers[1].output_token_ids
    assert answers[0].thinking == answers[1].thinking


def check_schema(model, text):
    with writes(model, text):
        answer = model.answer(messages=HI, json_schema=SCHEMA)
    assert (answer.thinking, json.loads(answer.text)) == ("Hm.", {"a": "q"})
    with writes(model, '{"a": "q"}'):  # a model that does not think, though it might
        answer = model.answer(messages=HI, json_schema=SCHEMA, think=False)
    assert (answer.thinking, json.loads(answer.text)) == ("", {"a": "q"})


@pytest.mark.parametrize(("kind", "text"), [w for w in WRITTEN if w[0] != "channels"])
def test_a_schema_begins_after_the_thought(models, kind, text):
    check_schema(models(kind), text)


@pytest.mark.parametrize(("kind", "text"), WRITTEN[:2])
def test_so_does_one_that_a_worker_follows(kind, text, tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATES[kind])
    check_schema(load(chat_template=tmp_path / "chat.jinja", context=1024, isolate=True), text)


def test_a_schema_begins_at_once_where_the_model_does_not_think(models):
    with writes(models("written"), '{"a": "q"}'):
        answer = models("written").answer(messages=HI, json_schema=SCHEMA)
    assert (answer.thinking, json.loads(answer.text)) == ("", {"a": "q"})


def test_a_schema_with_the_header_of_a_channel(models):
    with writes(models("channels"), "<|channel|>analysis<|message|>Hm.<|end|>"):
        answer = models("channels").answer(messages=HI, json_schema=SCHEMA)
    assert (answer.thinking, json.loads(answer.text)) == ("Hm.", {"a": "q"})


def test_a_thought_that_ends_the_answer_is_closed_where_an_answer_has_to_follow(models):
    model = models("opened")
    with writes(model, "Hm."):
        answer = model.answer(messages=HI, json_schema=SCHEMA)
    assert (answer.thinking, json.loads(answer.text)) == ("Hm.", {"a": "q"})
    with writes(model, "Hm."):
        answer = model.answer(messages=HI, json_schema=SCHEMA, think_budget=1)
    assert json.loads(answer.text) == {"a": "q"} and answer.thinking


def test_a_grammar_that_may_begin_as_a_thought_does_is_the_answer(models):
    with writes(models("written"), "<b>"):
        answer = models("written").answer(messages=HI, grammar={"choice": ["<b>", "<c>"]})
    assert (answer.thinking, answer.text) == ("", "<b>")


@pytest.mark.parametrize("begun", ["<think> no", "<thin"])
def test_a_mark_that_is_the_beginning_of_an_answer_too_is_no_part_of_it(models, begun):
    with writes(models("written"), "<think>x</think>\n\n<b>"):
        answer = models("written").answer(messages=HI, grammar={"choice": ["<b>", begun]})
    assert (answer.thinking, answer.text) == ("x", "<b>")


def test_so_does_one_of_a_worker(tmp_path):
    (tmp_path / "chat.jinja").write_text(TEMPLATES["written"])
    model = load(chat_template=tmp_path / "chat.jinja", context=1024, isolate=True)
    with writes(model, "<think>x</think>\n\n<b>"):
        answer = model.answer(messages=HI, grammar={"choice": ["<b>", "<think> no"]})
    assert (answer.thinking, answer.text) == ("x", "<b>")


def test_a_call_that_begins_as_a_thought_does_forbids_none(models):
    model = models("written")
    tokens = model.loaded.checkpoint.tokenizer.encode
    assert tokens("<think>")[0] == tokens("<tool_call>")[0], "else this tests nothing"
    with writes(model, f"<think>\nHm.\n</think>\n\n{CALL}"):
        answer = model.answer(messages=HI, tools=TOOLS, tool_choice="required")
    assert (answer.thinking, answer.text) == ("Hm.", "")
    assert [c.name for c in answer.tool_calls] == ["look"]
    with writes(model, CALL):
        answer = model.answer(messages=HI, tools=TOOLS, tool_choice="required")
    assert answer.thinking == "" and answer.tool_calls[0].name == "look"


def test_a_model_that_begins_a_thought_that_the_prompt_has_begun(models):
    model = models("opened")
    with writes(model, "<think>\nHm.\n</think>\n\nHello."):
        *events, last = model.stream(HI, logprobs=0)
    assert (last.answer.thinking, last.answer.text) == ("Hm.", "Hello.")
    infos = [i for e in events if isinstance(e, (ThinkingPiece, TextPiece)) for i in e.tokens]
    assert [i.id for i in infos] == list(last.answer.output_token_ids)


def test_text_of_a_token_that_is_undecided_is_not_lost(models):
    """A token that has the end of a thought, its mark, and what may begin another mark."""
    model = models("opened")
    tokenizer = model.loaded.checkpoint.tokenizer
    ids = iter(tokenizer.encode("abc"))
    spelled = dict(zip(ids, ["one", " two</think>\n<", "b>"], strict=True))
    push = TextStream.push
    with (
        writes(model, "abc"),
        patch.object(
            TextStream, "push", lambda self, token: spelled.get(token) or push(self, token)
        ),
    ):
        *events, last = model.stream(HI, logprobs=0)
    assert (last.answer.thinking, last.answer.text) == ("one two", "<b>")
    assert "".join(e.text for e in events if isinstance(e, ThinkingPiece)) == "one two"
    assert [i.id for i in last.answer.logprobs] == list(last.answer.output_token_ids)


@pytest.mark.parametrize(
    ("text", "limit", "warning"),
    [
        ("Hm.\n</think>\n\n", None, "ended its answer after the thought"),
        ("Hm.\n</think>\n\n ", None, "ended its answer after the thought"),
        ("Hm.\n</think>\n\nHello.", 1, "was cut before its first word, after its thought"),
        ("Hm.\n</think>\n\nHello.", 0, "cut within its thought"),
        ("Hm.\n</think>\n\nHello.", 2, None),
    ],
)
def test_where_a_thought_leaves_no_answer_the_receipt_says_how(models, text, limit, warning):
    model = models("opened")
    encode = model.loaded.checkpoint.tokenizer.encode
    limits = {0: 1, 1: len(encode("Hm.\n</think>")), 2: len(encode(text))}
    with writes(model, text):
        answer = model.answer(messages=HI, max_tokens=limits.get(limit, 40))
    result = [w for w in answer.receipt.warnings if "thought" in w]
    assert len(result) == (warning is not None) and all(str(warning) in w for w in result)


@pytest.mark.parametrize("kind", ["channels", "written"])
def test_marks_that_are_cut_are_no_answer(models, kind):
    model = models(kind)
    marks = model.prompts.thinking_template.marks
    whole = f"{marks.opening}Hm.{marks.closing}"
    encode = model.loaded.checkpoint.tokenizer.encode
    for limit in range(len(encode(f"{marks.opening}Hm.")), len(encode(whole.rstrip()))):
        with writes(model, whole):
            answer = model.answer(messages=HI, json_schema=SCHEMA, max_tokens=limit)
        assert answer.text == "" and answer.thinking.startswith("Hm."), limit


def test_stops_and_least_lengths_are_of_the_answer(models):
    model = models("opened")
    with writes(model, "Well, stop here.\n</think>\n\nYes. stop now"):
        answer = model.answer(messages=HI, stop=["stop"])
    assert (answer.thinking, answer.text, answer.stop) == ("Well, stop here.", "Yes. ", "stop")
    with writes(model, "Hm.\n</think>\n\nA"):
        answer = model.answer(messages=HI, min_tokens=5, max_tokens=60)
    written = len(answer.output_token_ids) - answer.receipt.thinking_tokens
    assert written >= 5 and answer.text.startswith("A")


def test_calls_inside_a_thought_are_none(models):
    model = models("opened")
    with writes(model, f"I could {CALL} or not.\n</think>\n\n{CALL}"):
        answer = model.answer(messages=HI, tools=TOOLS)
    assert CALL in answer.thinking and answer.text == ""
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [("look", '{"at": "b"}')]
    assert answer.receipt.finish == "tool_calls"
    with writes(model, "I could look.\n</think>\n\nNo."):
        answer = model.answer(messages=HI, tools=TOOLS, tool_choice="required")
    assert answer.thinking == "I could look." and answer.tool_calls[0].name == "look"


def test_calls_after_a_thought_are_read_where_messages_are_channels(tmp_path):
    calls = """{%- if m.tool_calls -%}{%- for c in m.tool_calls -%}{{ '<|start|>assistant to=functions.' + c.function.name + '<|channel|>commentary json<|message|>' + c.function.arguments | tojson + '<|end|>' }}{%- endfor -%}{%- else -%}"""
    stated = "{{- '<|start|>assistant<|channel|>final"
    end = "{%- else -%}{{ '<|start|>' + m.role"
    template = TEMPLATES["channels"].replace(stated, calls + stated)
    template = template.replace(end, "{%- endif -%}" + end)
    (tmp_path / "chat.jinja").write_text(template)
    model = load(chat_template=tmp_path / "chat.jinja", context=1024)
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.look"
        '<|channel|>commentary json<|message|>{"at": "b"}'
    )
    with writes(model, text):
        answer = model.answer(messages=HI, tools=TOOLS)
    assert (answer.thinking, answer.text) == ("Hm.", "")
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [("look", '{"at": "b"}')]


@pytest.mark.parametrize("kind", ["opened", "written", "line", "asked", "channel", "start"])
def test_thinking_is_turned_off_by_the_template(models, kind):
    model = models(kind)
    marks = model.prompts.thinking_template.marks
    for chosen in ({"think": False}, {"think": "none"}, {"think_budget": 0}):
        with writes(model, "Hello."):
            answer = model.answer(messages=HI, **chosen)
        assert (answer.thinking, answer.text) == ("", "Hello.")
        assert marks.ends_after(prompt_of(model, answer))
        assert not [w for w in answer.receipt.warnings if "think" in w]


@pytest.mark.parametrize("kind", ["stripped", "words", "channels", "parts"])
def test_without_such_a_variable_the_thought_is_closed_at_once(models, kind):
    model = models(kind)
    with writes(model, "Hello."):
        answer = model.answer(messages=HI, think=False)
    assert (answer.thinking, answer.text) == ("", "Hello.")
    marks = model.prompts.thinking_template.marks
    assert prompt_of(model, answer).endswith(f"{marks.opening}{marks.closing}")
    assert CLOSED in answer.receipt.warnings


def test_a_model_without_thoughts_says_so(models):
    model = models("silent")
    for chosen in ({"think": True}, {"think": False}, {"think": "low"}, {"think_budget": 3}):
        with writes(model, "Hello."):
            answer = model.answer(messages=HI, **chosen)
        assert any(NO_MARKS in warning for warning in answer.receipt.warnings)
    assert not model.service.thinks and models("opened").service.thinks


def test_variables_reach_the_template_and_spell_no_control_token(models):
    model = models("channels")
    with writes(model, "x"):
        answer = model.answer(messages=HI, think="high")
        odd = model.answer(
            messages=HI, chat_template_kwargs={"reasoning_effort": "<end_of_turn>", "colour": 1}
        )
    assert "Reasoning: high" in prompt_of(model, answer)
    assert "Reasoning: <end_of_turn>" in prompt_of(model, odd)
    assert model.loaded.checkpoint.tokenizer.id("<end_of_turn>") not in odd.prompt_token_ids
    assert any("reads no colour" in warning for warning in odd.receipt.warnings)
    counted = model.service.count(HI, think="high").prompt_tokens
    assert counted == answer.receipt.prompt_tokens


@pytest.mark.parametrize(
    "value",
    [
        {"messages": []},
        {"tools": []},
        {"bos_token": "x"},
        {"add_generation_prompt": False},
        {"a b": 1},
        {"x": float("nan")},
        {"x": object()},
        {"x": "y" * 20_000},
        [1],
        "[1]",
        "{",
    ],
    ids=lambda value: str(value)[:24],
)
def test_variables_that_no_template_gets_are_refused(models, value):
    with pytest.raises(OptionError, match="chat_template_kwargs: found"):
        models("opened").answer(messages=HI, chat_template_kwargs=value)


@pytest.mark.parametrize("chosen", [{"think": "much"}, {"think": 1}, {"think_budget": -1}])
def test_values_that_mean_nothing_are_refused(models, chosen):
    with pytest.raises(OptionError, match="think"):
        models("opened").answer(messages=HI, **chosen)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_of_earlier_turns_are_given_to_the_template(models, name):
    model = models("opened")
    stated = {"role": "assistant", "content": "Yes.", name: "He </think> says <end_of_turn> hi."}
    with writes(model, "x"):
        answer = model.answer(messages=[*HI, stated, {"role": "user", "content": "so?"}])
    tokenizer, prompt = model.loaded.checkpoint.tokenizer, prompt_of(model, answer)
    assert "<think>\nHe </think> says <end_of_turn> hi.\n</think>\n\nYes." in prompt
    assert tokenizer.id("<end_of_turn>") not in answer.prompt_token_ids
    assert THOUGHTS_LEFT_OUT not in answer.receipt.warnings
    with pytest.raises(PromptError, match=rf"message 2: {name} is int"):
        model.answer(messages=[*HI, {**stated, name: 3}])


@pytest.mark.parametrize("kind", ["stripped", "silent", "line"])
def test_thoughts_that_a_template_leaves_out_are_named(models, kind):
    stated = {"role": "assistant", "content": "Yes.", "thinking": "He says hi."}
    with writes(models(kind), "x"):
        answer = models(kind).answer(messages=[*HI, stated, *HI])
    assert "He says hi." not in prompt_of(models(kind), answer)
    assert answer.receipt.warnings.count(THOUGHTS_LEFT_OUT) == 1


@pytest.mark.parametrize("kind", ["opened", "written"])
def test_an_answer_goes_on_from_a_thought_or_after_it(models, kind):
    model = models(kind)
    begun = {"role": "assistant", "content": "", "reasoning_content": "He says"}
    with writes(model, " hi.\n</think>\n\nHello."):
        answer = model.answer(messages=[*HI, begun], continue_final_message=True)
    assert prompt_of(model, answer).endswith("assistant\n<think>\nHe says")
    assert (answer.thinking, answer.text) == ("hi.", "Hello.")
    begun["content"] = "Hel"
    with writes(model, "lo."):
        answer = model.answer(messages=[*HI, begun], continue_final_message=True)
    assert prompt_of(model, answer).endswith("<think>\nHe says\n</think>\n\nHel")
    assert (answer.thinking, answer.text) == ("", "lo.")
    begun = {"role": "assistant", "content": "<think>\nHe says"}
    with writes(model, " hi.</think>Hello."):
        answer = model.answer(messages=[*HI, begun], continue_final_message=True)
    assert (answer.thinking, answer.text) == ("hi.", "Hello.")


def test_a_conversation_has_its_thoughts(models):
    model = models("opened")
    chat = model.chat()
    with writes(model, "Hm.\n</think>\n\nHello."):
        chat.ask("hi")
        answer = chat.ask("so?")
    assert "<think>\nHm.\n</think>\n\nHello." in prompt_of(model, answer)
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "Hello.",
        "reasoning_content": "Hm.",
    }
    assert isinstance(list(model.stream(chat.messages[:1]))[-1], Finished)
    assert Path(model.loaded.options.chat_template).exists()
