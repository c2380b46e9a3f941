"""A service without a model: it answers at once, in words that say what it was given."""

from __future__ import annotations

import itertools
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

from mtmd import BusyError, PromptError, Receipt
from mtmd.base.turns import release_turn
from mtmd.checkpoint.facts import CheckpointFacts
from mtmd.events import Answer, Finished, Progress, TextPiece, TokenInfo, ToolCallPiece
from mtmd.kernels.report.facts import GraphFacts
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.options.answer import AnswerOptions
from mtmd.options.by_name import options
from mtmd.prompt.conversation import RawPrompt
from mtmd.prompt.load_image import Picture
from mtmd.receipt import ImageReceipt
from mtmd.service.latencies import Latencies

CONTEXT = 512
GRAPH = GraphFacts(
    "decoder", "warm-up", "1 token", 1, {"cpu": 1}, 1, (), {"cpu": 1000}, {}, {}, 0.0
)
REPORT = WarmupReport("fake", "cpu", "fake device", "fp32", (), (), (GRAPH,))


class FakeTicket:
    _ids = itertools.count(1)
    read: ClassVar = set()  # all that somebody iterates now

    def __init__(self, service, messages, settings, pictures):
        self.id = f"request-{next(self._ids)}"
        self.service, self.settings, self.messages, self.pictures = (
            service,
            settings,
            messages,
            pictures,
        )
        self.cancelled = threading.Event()

    def cancel(self):
        self.cancelled.set()

    def redirect(self, put):
        def run():
            try:
                for event in self:
                    put(event)
            except Exception as error:
                put(error)

        threading.Thread(target=run, daemon=True).start()

    def __iter__(self):
        release_turn()
        self.read.add(self)
        try:
            yield from self._events()
        finally:
            self.read.discard(self)

    def _events(self):
        service = self.service
        if service.calls and self.settings.toolbox.callable:
            yield from self._call(service.calls)
            return
        words = service.answer(self.messages, self.pictures).split(" ")
        for tile in range(len(self.pictures)):
            yield Progress("encode", tile + 1, len(self.pictures))
        yield Progress("prefill", 0, 7)
        if service.fails:
            raise service.fails
        stated = []
        for word in words[: self.settings.max_tokens]:
            if self.cancelled.wait(service.pace_s):
                yield self._finished(stated, "cancelled")
                return
            if word in self.settings.stop:
                yield self._finished(stated, "stop", stop=word)
                return
            stated.append(word if not stated else f" {word}")
            top = tuple((f"other{i}", -2.0) for i in range(self.settings.logprobs or 0))
            tokens = (
                () if self.settings.logprobs is None else (TokenInfo(5, stated[-1], -0.5, top),)
            )
            yield TextPiece(stated[-1], tokens)
        yield self._finished(stated, "stop" if len(stated) == len(words) else "length")

    def _call(self, calls):
        """Each in three pieces, as a model's would come."""
        for index, call in enumerate(calls):
            half = len(call.arguments) // 2
            yield ToolCallPiece(index, call.id, call.name, "")
            yield ToolCallPiece(index, None, None, call.arguments[:half])
            yield ToolCallPiece(index, None, None, call.arguments[half:])
        yield self._finished([], self.service.calls_finish, tuple(calls))

    def _finished(self, stated, finish, calls=(), stop=None):
        images = tuple(
            ImageReceipt(p.size, p.size, 1, 4, p.sha256, False, p.notes) for p in self.pictures
        )
        self.service.ended.append(finish)
        self.stated = len(stated)
        return Finished(
            Answer(
                "".join(stated),
                (1, 2),
                (5,) * len(stated),
                Receipt(
                    model="fake",
                    images=images,
                    image_tokens=4 * len(images),
                    prompt_tokens=7,
                    reused_tokens=3,
                    output_tokens=len(stated),
                    proposed_tokens=0,
                    accepted_tokens=0,
                    finish=finish,
                    **self.service.stage_ms,
                    device="cpu",
                    dtype="fp32",
                    attention={},
                    speculation="auto",
                    seed=self.settings.seed,
                    warnings=(),
                    videos=self.service.videos,
                    audio=self.service.sounds,
                ),
                calls,
                stop,
            )
        )


class FakeService:
    """`pace_s`: between two words. `fails`: raised after the first event. `refuses`: raised by
    `submit`.
    """

    def __init__(self, pace_s=0.0):
        self.pace_s, self.fails, self.refuses, self.waiting = pace_s, None, None, 0
        self.tickets, self.ended, self.words, self.running = [], [], None, 0
        self.tenants, self.fault, self.failure, self.reported = [], None, None, []
        self.videos, self.sounds = (), ()  # of receipts
        self.calls = ()  # of tools, in place of words where a request has tools
        self.latencies = Latencies()
        stages = ("queued", "preprocess", "encode", "prefill", "decode")
        self.stage_ms = {f"{stage}_ms": 0.0 for stage in stages}  # of every receipt
        self.calls_finish = "tool_calls"
        self.name, self.context, self.sees, self.warmup_report = "fake", CONTEXT, True, REPORT
        self.instructions = None
        self.checkpoint_facts = CheckpointFacts("gguf", "gemma3", 4_300_079_472, 2560, "Q4_K_M")

    def on_fault(self, report):
        self.reported.append(report)

    def fail(self, fault):
        self.fault = fault
        for report in self.reported:
            report(fault)

    def submit(self, messages, *, tenant="", **chosen):
        self.tenants.append(tenant)
        if self.refuses:
            raise self.refuses
        settings, pictures = (
            options(AnswerOptions, {k: v for k, v in chosen.items() if k != "json_schema"}),
            _pictures(messages),
        )
        if self.waiting > 60:
            raise BusyError("full")
        if isinstance(messages, RawPrompt):
            text = messages.text if isinstance(messages.text, str) else self.text_of(messages.text)
            messages = [{"role": "user", "content": text}]
        if not pictures and not any(
            _text(m).strip() for m in messages if m["role"] in ("user", "tool")
        ):
            raise PromptError("the prompt is empty; say what you want to know")
        ticket = FakeTicket(self, messages, settings, pictures)
        ticket.chosen = chosen
        self.tickets.append(ticket)
        return ticket

    def submit_several(self, messages, number, **chosen):
        return [self.submit(messages, **chosen) for _ in range(number)]

    def text_of(self, tokens):
        return " ".join(map(str, tokens))

    def answer(self, messages, pictures):
        return (
            self.words
            or f"{len(messages)} messages, pictures {[p.size for p in pictures]}: "
            f"{_text(messages[-1])}"
        )

    def count(self, messages, detail="auto", *, tenant="", **chosen):  # noqa: ARG002
        self.tenants.append(tenant)
        pictures = _pictures(messages)
        return SimpleNamespace(
            prompt_tokens=10 + 4 * len(pictures),
            image_tokens=(4,) * len(pictures),
            context=CONTEXT,
            video_tokens=(9,) * sum(p["type"] == "video" for p in _parts(messages)),
            audio_tokens=(7,) * sum(p["type"] == "audio" for p in _parts(messages)),
        )

    def tokens_of(self, text, *, special=True, around=False):
        return [1] * around + [2 if special else 3, *text.encode()]

    def spelling_of(self, tokens):
        return bytes(tokens).decode()

    chat_template = "{{ messages }}"
    special_tokens: ClassVar = {"eos_token": "</s>"}
    thinks = False

    def rendered(self, messages):
        _pictures(messages)
        return "".join(f"<{m['role']}>{_text(m)}" for m in messages)

    def stats(self):
        from mtmd.service.service import ServiceStats

        return ServiceStats(
            slots=4,
            running=self.running,
            waiting=self.waiting,
            requests=len(self.tickets),
            decode_ms=1500.0,
        )

    def processed(self, sha256, tenant=""):  # noqa: ARG002
        return None

    def close(self):
        for ticket in self.tickets:
            ticket.cancel()


def until(condition, limit_s=10.0):
    """Waits for a condition; False where it does not come true in time."""
    end = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _parts(messages):
    lists = [m["content"] for m in messages if isinstance(m["content"], list)]
    return [part for parts in lists for part in parts]


def _pictures(messages):
    if isinstance(messages, RawPrompt):
        return []
    result = [p["image"] for p in _parts(messages) if p["type"] == "image"]
    assert all(isinstance(p, Picture) for p in result)
    return result


def _text(message):
    content = message["content"]
    return (
        content or ""
        if content is None or isinstance(content, str)
        else " ".join(p["text"] for p in content if p["type"] == "text")
    )
