"""Describes what the worker processes of `isolated.py` do: schemas tried, and followed along an
answer. Loads without torch, to be loaded quickly.

A trial is one message in and one out: a schema, and what is wrong with it. An answer is a schema,
then its tokens one by one; to each, what may come next is the reply.
"""

from __future__ import annotations

import struct
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from mtmd.base.errors import OptionError
from mtmd.base.isolation.channel import Channel
from mtmd.base.isolation.limits import allow_time
from mtmd.llm.sampling.grammar import allowed_tokens, compile_grammar, read_vocabulary, take
from mtmd.llm.sampling.json_schema import GRAMMAR_CHARS_MAX

if TYPE_CHECKING:
    from llguidance import LLTokenizer

TRIAL, ANSWER = b"t", b"a"  # begin the first message of a job
# begin replies of an answer; what follows is the tokens that may come next, or what is wrong
GOES_ON, MAY_END, WRONG = b"g", b"e", b"w"
TOKEN = struct.Struct("<I")
STEP_S = 1.0  # of processor time for a token


def pack(tokens: list[bytes]) -> bytes:
    """A vocabulary as the message that `prepare` reads."""
    lengths = struct.pack(f"<I{len(tokens)}I", len(tokens), *map(len, tokens))
    return lengths + b"".join(tokens)


def prepare(setup: bytes) -> LLTokenizer:
    (count,) = struct.unpack_from("<I", setup)
    lengths = struct.unpack_from(f"<{count}I", setup, 4)
    start = 4 + 4 * count
    tokens = [setup[start + a : start + b] for a, b in pairwise(accumulate(lengths, initial=0))]
    vocabulary = read_vocabulary(tokens)
    # Done once here: no worker has to load and look up what every one needs.
    allowed_tokens(compile_grammar(vocabulary, '{"type": "object"}'))
    return vocabulary


def serve(channel: Channel, vocabulary: LLTokenizer) -> None:
    message = bytes(channel.receive(4 * GRAMMAR_CHARS_MAX))
    kind, schema = message[:1], message[1:].decode()
    if kind == ANSWER:
        _follow(channel, vocabulary, schema)
    else:
        wrong = ""
        try:
            allowed_tokens(compile_grammar(vocabulary, schema))
        except OptionError as error:
            wrong = str(error)
        channel.send(wrong.encode())


def _follow(channel: Channel, vocabulary: LLTokenizer, schema: str) -> None:
    """Until the other side has enough."""
    try:
        matcher = compile_grammar(vocabulary, schema)
        while True:
            bits = allowed_tokens(matcher)
            channel.send((MAY_END if matcher.is_accepting() else GOES_ON) + bits)
            (token,) = TOKEN.unpack(channel.receive(TOKEN.size))
            allow_time(STEP_S)
            take(matcher, token)
    except OptionError as error:
        channel.send(WRONG + str(error).encode())
