"""One conversation through every interface: at each turn the answer is that of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.request import Request, urlopen

import anthropic
import ollama
import openai
import pytest
from browsing import Visitor, chromium
from published_conversations import TEXTS, as_strings, part
from published_subject import BASE, CHAT, TOKENS, Subject, of

from mtmd import Finished, RawPrompt

SYSTEM = "You are a helpful assistant. Answer in one short sentence."
QUESTIONS = (
    "Name a yellow fruit.",
    "What colour is an orange,\nand what colour is a lemon?",
    "Write a line of Python that prints both colours.",
)
OLLAMA = {"num_predict": TOKENS, "temperature": 0}
TIMEOUT_S = 300
Messages = list[dict[str, Any]]
Say = Callable[[Subject, Messages, bool], str]
INTERFACES: dict[str, Say] = {}
RAW: dict[str, Callable[[Subject, str, bool], str]] = {}


def interface(table: dict[str, Any], name: str) -> Callable[[Any], Any]:
    def add(function: Any) -> Any:
        table[name] = function
        return function

    return add


@contextmanager
def of_openai(subject: Subject) -> Iterator[openai.OpenAI]:
    address = f"{subject.url}/v1"
    with openai.OpenAI(
        base_url=address, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        yield client


@contextmanager
def of_ollama(subject: Subject) -> Iterator[ollama.Client]:
    with ollama.Client(subject.url, timeout=TIMEOUT_S) as client:
        yield client


def posted(subject: Subject, path: str, **body: Any) -> list[dict[str, Any]]:
    """The answer, or the events of its stream."""
    headers = {"Content-Type": "application/json"}
    request = Request(f"{subject.url}{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=TIMEOUT_S) as answer:
        lines = [line.removeprefix("data: ") for line in answer.read().decode().splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def ended(events: Any) -> str:
    *_, last = events
    assert isinstance(last, Finished)
    return last.answer.text


@interface(INTERFACES, "python")
def _(subject: Subject, messages: Messages, stream: bool) -> str:
    chosen = {"messages": messages, "max_tokens": TOKENS, "temperature": 0}
    if stream:
        return ended(subject.fp32.stream(**chosen))
    return subject.fp32.answer(**chosen).text


@interface(INTERFACES, "chat completions")
def _(subject: Subject, messages: Messages, stream: bool) -> str:
    chosen = {"model": subject.path.name, "max_tokens": TOKENS, "temperature": 0}
    with of_openai(subject) as client:
        result = client.chat.completions.create(messages=messages, stream=stream, **chosen)
        if stream:
            return "".join(c.choices[0].delta.content or "" for c in result if c.choices)
        return str(result.choices[0].message.content)


@interface(INTERFACES, "responses")
def _(subject: Subject, messages: Messages, stream: bool) -> str:
    kinds = {"assistant": "output_text"}
    items = [
        m
        if isinstance(m["content"], str)
        else {
            **m,
            "content": [{**p, "type": kinds.get(m["role"], "input_text")} for p in m["content"]],
        }
        for m in messages
    ]
    chosen = {"model": subject.path.name, "max_output_tokens": TOKENS, "temperature": 0}
    with of_openai(subject) as client:
        result = client.responses.create(input=items, stream=stream, **chosen)
        if stream:
            return "".join(e.delta for e in result if e.type == "response.output_text.delta")
        return str(result.output_text)


@interface(INTERFACES, "messages")
def _(subject: Subject, messages: Messages, stream: bool) -> str:
    system, *rest = messages
    chosen = {
        "model": subject.path.name,
        "max_tokens": TOKENS,
        "extra_body": {"temperature": 0},
        "system": system["content"],
        "messages": rest,
    }
    with anthropic.Anthropic(
        base_url=subject.url, api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as client:
        if not stream:
            return client.messages.create(**chosen).content[0].text
        with client.messages.stream(**chosen) as events:
            return "".join(events.text_stream)


@interface(INTERFACES, "ollama")
def _(subject: Subject, messages: Messages, stream: bool) -> str:
    """Its client sends strings only."""
    with of_ollama(subject) as client:
        result = client.chat(subject.path.name, as_strings(messages), stream=stream, options=OLLAMA)
        if stream:
            return "".join(chunk.message.content or "" for chunk in result)
        return str(result.message.content)


@interface(INTERFACES, "llama.cpp")
def _(subject: Subject, messages: Messages, stream: bool) -> str:
    (prompt,) = posted(subject, "/apply-template", messages=messages)
    return RAW["llama.cpp"](subject, prompt["prompt"], stream)


@interface(INTERFACES, "completions")
def _(subject: Subject, messages: Messages, stream: bool) -> str:
    (prompt,) = posted(subject, "/apply-template", messages=messages)
    return RAW["completions"](subject, prompt["prompt"], stream)


@interface(RAW, "python")
def _(subject: Subject, prompt: str, stream: bool) -> str:  # noqa: ARG001
    return ended(subject.fp32.service.submit(RawPrompt(prompt), max_tokens=TOKENS, temperature=0))


@interface(RAW, "completions")
def _(subject: Subject, prompt: str, stream: bool) -> str:
    chosen = {"model": subject.path.name, "max_tokens": TOKENS, "temperature": 0}
    with of_openai(subject) as client:
        result = client.completions.create(prompt=prompt, stream=stream, **chosen)
        if stream:
            return "".join(chunk.choices[0].text for chunk in result if chunk.choices)
        return str(result.choices[0].text)


@interface(RAW, "llama.cpp")
def _(subject: Subject, prompt: str, stream: bool) -> str:
    chosen = {"n_predict": TOKENS, "temperature": 0, "stream": stream}
    events = posted(subject, "/completion", prompt=prompt, **chosen)
    return "".join(event["content"] for event in events)


@interface(RAW, "ollama")
def _(subject: Subject, prompt: str, stream: bool) -> str:
    with of_ollama(subject) as client:
        result = client.generate(subject.path.name, prompt, raw=True, stream=stream, options=OLLAMA)
        return "".join(c.response for c in result) if stream else str(result.response)


@of(*CHAT)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", ["strings", "parts"])
@pytest.mark.parametrize("name", INTERFACES)
def test_a_conversation(subject: Subject, name: str, form: str, stream: bool) -> None:
    messages: Messages = []

    def stated(role: str, text: str) -> None:
        content = text if form == "strings" else [part(line) for line in text.split("\n")]
        messages.append({"role": role, "content": content})

    stated("system", SYSTEM)
    for question in QUESTIONS:
        stated("user", question)
        answer = INTERFACES[name](subject, messages, stream)
        assert answer == subject.expected(as_strings(messages))
        stated("assistant", answer)


@of(*BASE)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", RAW)
def test_a_text_is_gone_on_with(subject: Subject, name: str, stream: bool) -> None:
    for text in [*TEXTS.values()][::10]:
        assert RAW[name](subject, text, stream) == subject.expected(text)


@of(*BASE)
def test_a_conversation_with_a_model_without_template_says_what_to_do(subject: Subject) -> None:
    stated = pytest.raises(openai.BadRequestError, match="--chat-template")
    with of_openai(subject) as client, stated:
        client.chat.completions.create(
            model=subject.path.name, messages=[{"role": "user", "content": "Hello"}]
        )


@of(*CHAT)
def test_a_chat_in_python(subject: Subject) -> None:
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    chat = subject.fp32.chat(system=SYSTEM, max_tokens=TOKENS, temperature=0)
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        answer = chat.ask(prompt=question).text
        assert answer == subject.expected(messages)
        messages.append({"role": "assistant", "content": answer})


def printed(subject: Subject, *words: str, stated: str = "") -> str:
    options = ["-m", str(subject.path), "--dtype", "fp32", "--max-tokens", str(TOKENS)]
    command = [sys.executable, "-m", "mtmd", *words, *options, "--temperature", "0"]
    done = subprocess.run(
        command, input=stated, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    return done.stdout


@of(*CHAT)
def test_a_question_on_the_command_line(subject: Subject) -> None:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": QUESTIONS[0]}]
    result = printed(subject, "ask", QUESTIONS[0], "--system", SYSTEM)
    assert result.split() == subject.expected(messages).split()


@of(*CHAT)
def test_a_chat_on_the_command_line(subject: Subject) -> None:
    questions = [question.replace("\n", " ") for question in QUESTIONS]
    result = printed(
        subject, "chat", "--system", SYSTEM, "--no-history", stated="\n".join(questions)
    )
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    words = result.split()
    for question in questions:
        messages.append({"role": "user", "content": question})
        answer = subject.expected(messages)
        count = len(answer.split())
        assert words[:count] == answer.split()
        del words[:count]
        messages.append({"role": "assistant", "content": answer})
    assert not words


@of("smollm2")
def test_a_conversation_on_the_page(subject: Subject) -> None:
    messages: Messages = [{"role": "system", "content": SYSTEM}]
    with chromium() as browser:
        person = Visitor(browser, subject.url)
        person.page.click("#open-settings")
        for name, value in (("system", SYSTEM), ("max_tokens", TOKENS), ("temperature", 0)):
            person.page.fill(f"[name={name}]", str(value))
        person.page.click("#settings >> text=Done")
        for turn, question in enumerate(QUESTIONS[:2]):
            messages.append({"role": "user", "content": question})
            person.say(question)
            answer = subject.expected(messages)
            assert person.texts("answer")[turn].split() == answer.split()
            messages.append({"role": "assistant", "content": answer})
        person.close()
