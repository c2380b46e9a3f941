"""Answers in the form of OpenAI's chat and plain completions. What is ours stands under names that
begin with `mtmd`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mtmd import Answer, Progress, PromptTokenInfo, Receipt, TokenInfo, ToolCallPiece, __version__
from mtmd.web.answering.tools import CustomCall, CustomCallPiece

_FAR = 4  # characters that tokens of parts of them may stand for


@dataclass(frozen=True)
class Reply:
    """What all parts of one answer have in common. `logprobs`: whether they were asked for;
    `thoughts`: whether what the model thought is sent;
    `warnings` go into its receipt; `index` is its place among several answers to one request;
    `calls_old_way`: a call is a `function_call`, as before there were tools; `prompt_logprobs`:
    how many alternatives each token of the prompt has in vLLM's field, None for no such field.
    """

    id: str
    model: str
    logprobs: bool = False
    warnings: tuple[str, ...] = ()
    index: int = 0
    calls_old_way: bool = False
    prompt_logprobs: int | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    thoughts: bool = True

    def chat(self, answer: Answer, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
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
            "logprobs": self._chat_logprobs(tokens),
            "finish_reason": self._finish(answer.receipt.finish),
        }
        return (
            self._head("chat.completion")
            | ({} if self.index else self._of_prompt(answer))
            | {"choices": [choice], "usage": self.usage(answer.receipt)}
        )

    def chat_chunk(
        self, delta: dict[str, Any], tokens: Sequence[TokenInfo] = (), finish: str | None = None
    ) -> dict[str, Any]:
        logprobs = self._chat_logprobs(tokens) if tokens else None
        return self._head("chat.completion.chunk") | {
            "choices": [
                {"index": self.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            ]
        }

    def chat_call(self, piece: ToolCallPiece) -> dict[str, Any]:
        if isinstance(piece, CustomCallPiece):
            whole = CustomCall(piece.id or "", piece.name or "", piece.arguments)
            return self.chat_chunk({"tool_calls": [{"index": piece.index} | whole.asdict()]})
        call: dict[str, Any] = {"index": piece.index}
        if piece.id is not None:
            call |= {"id": piece.id, "type": "function"}
        name = {} if piece.name is None else {"name": piece.name}
        call["function"] = {**name, "arguments": piece.arguments}
        if self.calls_old_way:
            return self.chat_chunk({"function_call": call["function"]})
        return self.chat_chunk({"tool_calls": [call]})

    def chat_text(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return self.chat_chunk({"content": text}, tokens)

    def chat_thought(self, text: str) -> dict[str, Any]:
        return self.chat_chunk({"reasoning_content": text})

    def chat_end(self, finish: str) -> dict[str, Any]:
        return self.chat_chunk({}, finish=self._finish(finish))

    def _finish(self, finish: str) -> str:
        is_old = self.calls_old_way and finish == "tool_calls"
        return "function_call" if is_old else finish

    def plain(
        self, answer: Answer, tokens: Sequence[TokenInfo | PromptTokenInfo]
    ) -> dict[str, Any]:
        reply = self._plain(answer.text, tokens, answer.receipt.finish)
        reply["choices"][0] |= self._of_prompt(answer)
        return reply | {"usage": self.usage(answer.receipt)}

    def _of_prompt(self, answer: Answer) -> dict[str, Any]:
        """As vLLM has it: None for the first token; for each other a mapping of ids to log
        probabilities, of the token itself and of the most probable ones.
        """
        if self.prompt_logprobs is None:
            return {}
        found: list[dict[str, Any] | None] = [None]
        for token in answer.prompt_logprobs[1:]:
            best = [*zip(token.top_ids, token.top, strict=True)][: self.prompt_logprobs]
            entry = {str(token.id): _ranked(token.text, token.logprob, token.rank)}
            for rank, (id, (text, logprob)) in enumerate(best, 1):
                entry.setdefault(str(id), _ranked(text, logprob, rank))
            found.append(entry)
        return {"prompt_logprobs": found}

    def plain_text(self, text: str, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return self._plain(text, tokens, None)

    def plain_end(self, finish: str) -> dict[str, Any]:
        return self._plain("", (), finish)

    def _plain(
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

    def _chat_logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any] | None:
        return {"content": list(_chat_tokens(tokens)), "refusal": None} if self.logprobs else None

    def usage(self, *receipts: Receipt) -> dict[str, Any]:
        """Of all answers to one prompt; the receipt is the first one's."""
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

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"mtmd-{__version__}",
        }


def progress(chunk: dict[str, Any], event: Progress) -> dict[str, Any]:
    """A chunk that is empty in OpenAI's fields, and has in ours how far the prompt is."""
    return chunk | {"mtmd": {"progress": asdict(event)}}


def together(replies: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
    """Several answers to one request as one."""
    choices = [choice for reply in replies for choice in reply["choices"]]
    return replies[0] | {"choices": choices, "usage": usage}


def _ranked(text: str, logprob: float | None, rank: int | None) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}


def _top(token: TokenInfo | PromptTokenInfo) -> dict[str, float] | None:
    """The most probable ones, and the token itself; None of the first of a prompt."""
    if token.logprob is None:
        return None
    return dict(token.top) | ({token.text: token.logprob} if token.top else {})


def _offsets(text: str, tokens: Sequence[TokenInfo | PromptTokenInfo]) -> Iterator[int]:
    """Where in a text each token begins. Special tokens, which a text has not, are between others;
    parts of a character are where it is.
    """
    at = 0
    for token in tokens:
        own = token.text.strip("\ufffd")
        found = text.find(own, at, at + len(own) + _FAR) if own else -1
        if found < 0 and own.startswith(" ") and text.startswith(own[1:], at):
            found, own = at, own[1:]  # the first of a text may come without its blank
        yield at if found < 0 or own != token.text else found
        at = at if found < 0 else found + len(own)


def _chat_tokens(tokens: Sequence[TokenInfo]) -> Iterator[dict[str, Any]]:
    for token in tokens:
        yield _logprob(token.text, token.logprob) | {
            "top_logprobs": [_logprob(text, logprob) for text, logprob in token.top]
        }


def _logprob(text: str, logprob: float) -> dict[str, Any]:
    """`bytes` is None for a part of a character: the text stands for it, and is not its bytes."""
    return {
        "token": text,
        "logprob": logprob,
        "bytes": None if "\ufffd" in text else list(text.encode()),
    }
