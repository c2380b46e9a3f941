"""Tokens of an answer become text, thoughts and tool calls for the reader of its ticket."""

from __future__ import annotations

import logging
from dataclasses import replace

from mtmd.base.errors import MtmdError
from mtmd.base.tracebacks import traceback_text
from mtmd.events import Answer, Finished, TextPiece, ThinkingPiece, TokenInfo, ToolCallPiece
from mtmd.llm.engine.sequence import Token
from mtmd.llm.tokenizer.tokenizer import Tokenizer
from mtmd.service.request import Request
from mtmd.thinking.marks import ThoughtText
from mtmd.tools.parser import CallPiece, Piece

log = logging.getLogger("mtmd.service")


class AnswerWriter:
    """Answer writer of one service. The thread of the device drives it, but for `put_spelled`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def read_token(self, request: Request, token: Token) -> bool:
        """Hand a token on. Returns whether it is one of the thought, False if unknown yet."""
        infos: tuple[TokenInfo, ...] = () if token.logprob is None else (self._info(token),)
        if request.thought is None:
            self._parse(request, request.stream.push(token.id), infos)
            return False
        pieces, is_thought = request.thought.read(token.id)
        request.undecided += infos
        infos = ()
        if is_thought is not None:
            infos, request.undecided = request.undecided, ()
        thought = "".join(p.text for p in pieces if isinstance(p, ThoughtText))
        self._think(request, thought, infos if is_thought else ())
        text = "".join(p for p in pieces if isinstance(p, str))
        if text or is_thought is False:
            self._parse(request, text, () if is_thought else infos)
        return bool(is_thought)

    def read_rest(self, request: Request) -> None:
        """Hand on what was kept back until the end of the answer."""
        if request.thought is None:
            self._parse(request, request.stream.finish(), (), last=True)
            return
        pieces = request.thought.finish()
        self._think(request, "".join(p.text for p in pieces if isinstance(p, ThoughtText)), ())
        text = "".join(p for p in pieces if isinstance(p, str))
        self._parse(request, text, request.undecided, last=True)

    def _think(self, request: Request, text: str, infos: tuple[TokenInfo, ...]) -> None:
        if text or infos:
            request.thoughts.append(text)
            request.logprobs += infos
            request.ticket.put(ThinkingPiece(text, infos))

    def _parse(
        self, request: Request, text: str, infos: tuple[TokenInfo, ...], *, last: bool = False
    ) -> None:
        """Hand on more of the answer: its text, and calls in it by themselves."""
        pieces: list[Piece] = [text]
        if request.parser is not None:
            pieces = request.parser.push(text)
            pieces += request.parser.finish() if last else []
        texts = [request.checker.push(piece) for piece in pieces if isinstance(piece, str)]
        texts += [request.checker.finish()] if last else []
        self._write(request, "".join(texts), infos)
        for piece in pieces:
            if isinstance(piece, CallPiece) and request.checker.result is None:
                request.ticket.put(
                    ToolCallPiece(piece.index, piece.id, piece.name, piece.arguments)
                )

    def _write(self, request: Request, text: str, infos: tuple[TokenInfo, ...]) -> None:
        if text or infos:
            request.texts.append(text)
            request.logprobs += infos
            request.ticket.put(TextPiece(text, infos))

    def _info(self, token: Token) -> TokenInfo:
        decode = self._tokenizer.decode
        top = tuple((decode([i], skip_special=False), p) for i, p in token.top)
        return TokenInfo(
            token.id, decode([token.id], skip_special=False), token.logprob or 0.0, top
        )

    def put_spelled(self, request: Request, answer: Answer) -> None:
        """Hand on the answer with the log probabilities of its prompt, on a thread of its own."""
        decode = self._tokenizer.decode
        try:
            result = request.scores.spelled(
                request.prompt.tokens[0], lambda i: decode([i], skip_special=False)
            )
            request.ticket.put(Finished(replace(answer, prompt_logprobs=result)))
        except Exception as error:
            log.error("%s\n%s", request.ticket.id, traceback_text(error))
            request.ticket.put(MtmdError(f"internal error: {type(error).__name__}"))

    def end_of(self, request: Request) -> TokenInfo | None:
        """Return the stop token of an answer, if its probability was requested."""
        last = request.sequence.last if request.sequence else None
        return None if last is None or last.logprob is None else self._info(last)
