"""Answers in the form of OpenAI's chat and plain completions, whole and in chunks, in the order in
which OpenAI's servers send them. What is ours stands under names that begin with `mtmd`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mtmd import (
    Answer,
    Event,
    Finished,
    Progress,
    PromptTokenInfo,
    Receipt,
    TextPiece,
    ThinkingPiece,
    TokenInfo,
    ToolCallPiece,
    __version__,
)
from mtmd.prompt_logprobs import check_prompt_logprobs
from mtmd.web import sse
from mtmd.web.answering.answer import Form
from mtmd.web.answering.response_streams import Collected, Writer
from mtmd.web.answering.tools import CustomCall, CustomCallPiece
from mtmd.web.errors import ApiError
from mtmd.web.interfaces.openai_requests import ChatRequest, CompletionRequest
from mtmd.web.served_model import ServedModel

DONE = "data: [DONE]\n\n"
_FAR = 4  # characters that tokens of parts of them may stand for


@dataclass(frozen=True)
class Reply:
    """Describes what all parts of one answer have in common. `logprobs`: whether they were
    requested; `warnings` go into its receipt; `index` is its place among several answers to one
    request; `prompt_logprobs`: how many alternatives each token of the prompt has in vLLM's field,
    None for no such field; `thoughts`: whether what the model thought is sent.
    """

    id: str
    model: str
    logprobs: bool = False
    warnings: tuple[str, ...] = ()
    index: int = 0
    prompt_logprobs: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    thoughts: bool = False

    def whole(
        self, answer: Answer, tokens: Sequence[TokenInfo | PromptTokenInfo]
    ) -> dict[str, Any]:
        raise NotImplementedError

    def first(self) -> dict[str, Any] | None:
        """Return what opens a stream."""
        return None

    def quiet(self) -> dict[str, Any]:
        """A chunk without text."""
        return self.text("", ())

    def text(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        raise NotImplementedError

    def thought(self, _: str) -> dict[str, Any]:
        return self.quiet()

    def call(self, _: ToolCallPiece) -> dict[str, Any]:
        return self.quiet()

    def end(self, finish: str) -> dict[str, Any]:
        raise NotImplementedError

    def usage(self, *receipts: Receipt) -> dict[str, Any]:
        """Return the usage of all answers to one prompt; the receipt is the first one's."""
        first = receipts[0]
        output = sum(receipt.output_tokens for receipt in receipts)
        given = first.asdict()
        return {
            "prompt_tokens": first.prompt_tokens,
            "completion_tokens": output,
            "total_tokens": first.prompt_tokens + output,
            "prompt_tokens_details": {"cached_tokens": first.reused_tokens},
            "completion_tokens_details": {
                "reasoning_tokens": sum(receipt.thinking_tokens for receipt in receipts)
            },
            "mtmd_receipt": given | {"warnings": [*given["warnings"], *self.warnings]},
        }

    def _of_prompt(self, answer: Answer) -> dict[str, Any]:
        """Return log probabilities of a prompt as vLLM does: None for the first token; for each
        other a mapping of ids to log probabilities, of the token itself and of the most probable
        ones.
        """
        if self.prompt_logprobs is None:
            return {}
        result: list[dict[str, Any] | None] = [None]
        for token in answer.prompt_logprobs[1:]:
            best = [*zip(token.top_ids, token.top, strict=True)][: self.prompt_logprobs]
            entry = {str(token.id): _ranked(token.text, token.logprob, token.rank)}
            for rank, (id, (text, logprob)) in enumerate(best, 1):
                entry.setdefault(str(id), _ranked(text, logprob, rank))
            result.append(entry)
        return {"prompt_logprobs": result}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"mtmd-{__version__}",
        }


@dataclass(frozen=True)
class ChatReply(Reply):
    """`calls_old_way`: a call is a `function_call`, as before there were tools."""

    calls_old_way: bool = False

    def whole(
        self, answer: Answer, tokens: Sequence[TokenInfo | PromptTokenInfo]
    ) -> dict[str, Any]:
        calls = [call.asdict() for call in answer.tool_calls]
        text = answer.text or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if answer.thinking and self.thoughts:
            message["reasoning_content"] = answer.thinking
        if calls and self.calls_old_way:
            message["function_call"] = calls[0]["function"]
        elif calls:
            message["tool_calls"] = calls
        choice = {
            "index": self.index,
            "message": message,
            "logprobs": self._logprobs(tokens),
            "finish_reason": self._finish(answer.receipt.finish),
        }
        return (
            self._head("chat.completion")
            | ({} if self.index else self._of_prompt(answer))
            | {"choices": [choice], "usage": self.usage(answer.receipt)}
        )

    def first(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def quiet(self) -> dict[str, Any]:
        return self._chunk({})

    def text(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return self._chunk({"content": text}, tokens)

    def thought(self, text: str) -> dict[str, Any]:
        return self._chunk({"reasoning_content": text})

    def call(self, piece: ToolCallPiece) -> dict[str, Any]:
        if isinstance(piece, CustomCallPiece):
            whole = CustomCall(piece.id or "", piece.name or "", piece.arguments)
            return self._chunk({"tool_calls": [{"index": piece.index} | whole.asdict()]})
        call: dict[str, Any] = {"index": piece.index}
        if piece.id is not None:
            call |= {"id": piece.id, "type": "function"}
        name = {} if piece.name is None else {"name": piece.name}
        call["function"] = {**name, "arguments": piece.arguments}
        if self.calls_old_way:
            return self._chunk({"function_call": call["function"]})
        return self._chunk({"tool_calls": [call]})

    def end(self, finish: str) -> dict[str, Any]:
        return self._chunk({}, finish=self._finish(finish))

    def _chunk(
        self, delta: dict[str, Any], tokens: Sequence[TokenInfo] = (), finish: str | None = None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if tokens else None
        return self._head("chat.completion.chunk") | {
            "choices": [
                {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            ]
        }

    def _finish(self, finish: str) -> str:
        is_old = self.calls_old_way and finish == "tool_calls"
        return "function_call" if is_old else finish

    def _logprobs(self, tokens: Sequence[TokenInfo | PromptTokenInfo]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        content = [
            _logprob(token.text, token.logprob)
            | {"top_logprobs": [_logprob(text, logprob) for text, logprob in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True)
class PlainReply(Reply):
    """Reply to a plain completion, which has neither thoughts nor tools."""

    def whole(
        self, answer: Answer, tokens: Sequence[TokenInfo | PromptTokenInfo]
    ) -> dict[str, Any]:
        reply = self._choice(answer.text, tokens, answer.receipt.finish)
        reply["choices"][0] |= self._of_prompt(answer)
        return reply | {"usage": self.usage(answer.receipt)}

    def text(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return self._choice(text, tokens, None)

    def end(self, finish: str) -> dict[str, Any]:
        return self._choice("", (), finish)

    def _choice(
        self, text: str, tokens: Sequence[TokenInfo | PromptTokenInfo], finish: str | None
    ) -> dict[str, Any]:
        logprobs = (
            {
                "tokens": [t.text for t in tokens],
                "token_logprobs": [t.logprob for t in tokens],
                "top_logprobs": [_top(t) for t in tokens],
                "text_offset": list(_offsets(text, tokens)),
            }
            if self.logprobs
            else None
        )
        return self._head("text_completion") | {
            "choices": [
                {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": finish}
            ]
        }


class CompletionForm(Form):
    """The answers to one request, `each` for every prompt."""

    def __init__(self, body: ChatRequest | CompletionRequest, reply: Reply) -> None:
        self._body, self._reply, self._each = body, reply, body.n or 1
        self._number = self._each * (1 if isinstance(body, ChatRequest) else len(body.prompt))

    def check(self, model: ServedModel) -> None:
        """Raises OptionError where the prompts together have too many log probabilities. Those of
        one prompt are counted when it is submitted.
        """
        body = self._body
        if isinstance(body, ChatRequest) or len(body.prompt) == 1:
            return
        alternatives = body.options().get("prompt_logprobs")
        if alternatives is None:
            return
        tokens = sum(
            len(model.service.tokens_of(one, around=True) if isinstance(one, str) else one)
            for one in body.prompt
        )
        field = "logprobs" if body.scores_prompt else "prompt_logprobs"
        check_prompt_logprobs(field, tokens, alternatives, self._each)

    def whole(self, model: ServedModel, answers: Sequence[Collected]) -> dict[str, Any]:
        echo = self._echo(model) or [""] * self._number
        parts = [
            reply.whole(replace(one.answer, text=text + one.answer.text), self._tokens(one))
            for reply, one, text in zip(self._replies(model), answers, echo, strict=True)
        ]
        choices = [choice for part in parts for choice in part["choices"]]
        usage = self.usage([one.answer.receipt for one in answers])
        return parts[0] | {"choices": choices, "usage": usage}

    def writer(self, model: ServedModel) -> Writer:
        return _ChunkWriter(self, self._replies(model), self._echo(model), self._body)

    def failure(self, error: ApiError) -> str:
        return super().failure(error) + DONE

    def usage(self, receipts: Sequence[Receipt]) -> dict[str, Any]:
        """Return the usage of all answers: each prompt counts once."""
        usage = self._reply.usage(*receipts)
        usage["prompt_tokens"] = sum(receipt.prompt_tokens for receipt in receipts[:: self._each])
        usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
        return usage

    def _replies(self, model: ServedModel) -> list[Reply]:
        name = model.called(self._body.model)
        return [replace(self._reply, model=name, index=index) for index in range(self._number)]

    def _echo(self, model: ServedModel) -> list[str]:
        """Return what each answer begins with; nothing where that was not requested."""
        body = self._body
        if isinstance(body, ChatRequest) or not body.echo:
            return []
        texts = [p if isinstance(p, str) else model.service.text_of(p) for p in body.prompt]
        return [text for text in texts for _ in range(self._each)]

    def _tokens(self, one: Collected) -> Sequence[TokenInfo | PromptTokenInfo]:
        body = self._body
        if isinstance(body, ChatRequest) or not body.scores_prompt:
            return one.tokens
        # so that an answer of one token has one whatever it is: clients leave it out
        end = [one.answer.end] if one.answer.end else []
        scored = [replace(t, top=t.top[: body.logprobs]) for t in one.answer.prompt_logprobs]
        return [*scored, *one.tokens, *end]


class _ChunkWriter(Writer):
    """Writes the answers to one request as chunks. `echo`: what each of them begins with."""

    def __init__(
        self,
        form: CompletionForm,
        replies: Sequence[Reply],
        echo: Sequence[str],
        body: ChatRequest | CompletionRequest,
    ) -> None:
        self._form, self._replies, self._echo = form, replies, echo
        options = body.stream_options
        self._sends_usage = options is not None and bool(options.include_usage)
        self._sends_progress = bool(body.return_progress)
        self._receipts: dict[int, Receipt] = {}
        self._written = Counter[int]()  # characters of each answer

    def begin(self) -> Iterator[str]:
        for reply in self._replies:
            if first := reply.first():
                yield sse.event(first)
        for index, text in enumerate(self._echo):
            yield sse.event(self._replies[index].text(text, ()))
            self._written[index] += len(text)

    def write(self, index: int, event: Event) -> Iterator[str]:
        reply = self._replies[index]
        if isinstance(event, Progress) and self._sends_progress:
            # empty in OpenAI's fields, and has in ours how far the prompt is
            yield sse.event(reply.quiet() | {"mtmd": {"progress": asdict(event)}})
        elif isinstance(event, ThinkingPiece):
            if event.text and reply.thoughts:
                yield sse.event(reply.thought(event.text))
        elif isinstance(event, TextPiece):
            yield sse.event(_located(reply.text(event.text, event.tokens), self._written[index]))
            self._written[index] += len(event.text)
        elif isinstance(event, ToolCallPiece):
            yield sse.event(reply.call(event))
        elif isinstance(event, Finished):
            receipt = self._receipts[index] = event.answer.receipt
            yield sse.event(reply.end(receipt.finish))

    def end(self) -> Iterator[str]:
        if self._sends_usage:
            usage = self._form.usage([self._receipts[index] for index in sorted(self._receipts)])
            yield sse.event(self._replies[0].quiet() | {"choices": [], "usage": usage})
        yield DONE


def _located(chunk: dict[str, Any], before: int) -> dict[str, Any]:
    """A chunk after so many characters of its answer."""
    for choice in chunk["choices"]:
        result = choice["logprobs"]
        if result and "text_offset" in result:
            result["text_offset"] = [offset + before for offset in result["text_offset"]]
    return chunk


def _ranked(text: str, logprob: float | None, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def _top(token: TokenInfo | PromptTokenInfo) -> dict[str, float] | None:
    """The most probable ones, and the token itself; None of the first of a prompt."""
    if token.logprob is None:
        return None
    return dict(token.top) | ({token.text: token.logprob} if token.top else {})


def _offsets(text: str, tokens: Sequence[TokenInfo | PromptTokenInfo]) -> Iterator[int]:
    """Yield where in a text each token begins. Special tokens, which a text has not, are between
    others; parts of a character are where it is.
    """
    at = 0
    for token in tokens:
        own = token.text.strip("\ufffd")
        result = text.find(own, at, at + len(own) + _FAR) if own else -1
        if result < 0 and own.startswith(" ") and text.startswith(own[1:], at):
            result, own = at, own[1:]  # the first of a text may come without its blank
        yield at if result < 0 or own != token.text else result
        at = at if result < 0 else result + len(own)


def _logprob(text: str, logprob: float | None) -> dict[str, Any]:
    """`bytes` is None for a part of a character: the text stands for it, and is not its bytes."""
    return {
        "token": text,
        "logprob": logprob,
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }
