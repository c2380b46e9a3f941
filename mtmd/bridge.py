"""The batching bridge: pictures and a rendered prompt become spans that the decoder reads.

Pictures are prepared, encoded in batches of equal tiles, and put where the chat template left their marker. Encoded pictures are
remembered by their content: pixels and size, for this model in this compute type; never by path or name.
"""
from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor

from mtmd.clip.encoder import Encoder
from mtmd.clip.family import ImagePlan
from mtmd.clip.image import Picture
from mtmd.kernels.errors import PromptError
from mtmd.kernels.executor import Observer
from mtmd.llm.sequence import Span
from mtmd.llm.tokenizer import Tokenizer
from mtmd.receipt import ImageReceipt

CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Encoded:
    """A picture's embeddings [T, D] and what its receipt says."""
    plan: ImagePlan
    embeddings: Tensor
    receipt: ImageReceipt


class Encoding:
    """Pictures on their way to embeddings: iterate for (tiles done, tiles in all), then read `found` and the times in milliseconds."""

    def __init__(self, bridge: Bridge, pictures: Sequence[Picture], observe: Observer | None = None):
        self.found: list[Encoded] = []
        self.prepare_ms = self.encode_ms = 0.0
        self._bridge, self._pictures, self._observe = bridge, pictures, observe

    def __iter__(self) -> Iterator[tuple[int, int]]:
        bridge, clock = self._bridge, time.perf_counter()
        keys = [p.sha256 for p in self._pictures]
        known = {} if self._observe else {key: entry for key in keys if (entry := bridge.known(key))}
        plans = {key: bridge.encoder.family.prepare(p.pixels) for key, p in zip(keys, self._pictures, strict=True) if key not in known}
        self.prepare_ms = (time.perf_counter() - clock) * 1e3
        tiles = [tile for plan in plans.values() for tile in plan.tiles]
        done: dict[int, Tensor] = {}
        if tiles:
            yield 0, len(tiles)
        clock = time.perf_counter()
        for part, values in bridge.encoder.batches(tiles, self._observe):
            done.update(zip(part, values, strict=True))
            self.encode_ms += (time.perf_counter() - clock) * 1e3
            yield len(done), len(tiles)
            clock = time.perf_counter()
        ordered = iter([done[i] for i in range(len(tiles))])
        entries = known | {key: (plan, torch.cat([next(ordered) for _ in plan.tiles])) for key, plan in plans.items()}
        for key in keys:
            bridge.remember(key, entries[key])
        seen = set(known)  # the second of two equal pictures costs nothing either
        for key, picture in zip(keys, self._pictures, strict=True):
            self.found.append(Encoded(*entries[key], _receipt(picture, entries[key][0], key in seen)))
            seen.add(key)


class Bridge:
    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, device: torch.device):
        self.encoder, self.tokenizer, self.device = encoder, tokenizer, device
        self._cache: OrderedDict[str, tuple[ImagePlan, Tensor]] = OrderedDict()
        self._lock = Lock()

    def encode(self, pictures: Sequence[Picture], observe: Observer | None = None) -> Encoding:
        """Start on the pictures; iterate over what is returned to do the work. Each different picture is encoded once, and where somebody
        observes, even if it is remembered."""
        return Encoding(self, pictures, observe)

    def known(self, key: str) -> tuple[ImagePlan, Tensor] | None:
        with self._lock:
            return self._cache.get(key)

    def remember(self, key: str, entry: tuple[ImagePlan, Tensor]) -> None:
        """The most recently used come last; the oldest go when there is too much."""
        plan = ImagePlan((), entry[0].sizes, entry[0].tokens, entry[0].prompt)  # pixels are not needed again
        with self._lock:
            self._cache.pop(key, None)
            self._cache[key] = plan, entry[1]
            while len(self._cache) > 1 and sum(e.nbytes for _, e in self._cache.values()) > CACHE_BYTES:
                self._cache.popitem(last=False)

    def spans(self, rendered: str, encoded: Sequence[Encoded]) -> list[Span]:
        """The rendered prompt with pictures at their markers. Raises PromptError where the template wrote more or fewer markers."""
        family = self.encoder.family
        pieces = rendered.split(family.marker)
        if len(pieces) - 1 != len(encoded):
            raise PromptError(f"the chat template wrote {len(pieces) - 1} picture places for {len(encoded)} pictures; "
                              "it does not fit this model")
        text = pieces[0] + "".join(e.plan.prompt + piece for e, piece in zip(encoded, pieces[1:], strict=True))
        return _to_spans(self.tokenizer.encode(text), self.tokenizer.id(family.image_token), encoded, family.bidirectional, self.device)


def _to_spans(tokens: list[int], image_token: int, encoded: Sequence[Encoded], block: bool, device: torch.device) -> list[Span]:
    """Runs of text, and a span for each picture's image tokens."""
    spans, start, waiting = [], 0, list(encoded)
    while start < len(tokens):
        stop = start
        if tokens[start] == image_token:
            if not waiting:
                raise PromptError(f"the chat template wrote image tokens for more than {len(encoded)} pictures; it does not fit this model")
            picture = waiting.pop(0)
            stop = start + picture.plan.tokens
            if tokens[start:stop] != [image_token] * picture.plan.tokens:
                raise PromptError(f"a picture's {picture.plan.tokens} image tokens do not stand together in the prompt; "
                                  "the tokenizer does not fit this model")
            spans.append(Span(tuple(tokens[start:stop]), picture.embeddings.to(device), block))
        else:
            while stop < len(tokens) and tokens[stop] != image_token:
                stop += 1
            spans.append(Span(tuple(tokens[start:stop])))
        start = stop
    return spans


def _receipt(picture: Picture, plan: ImagePlan, cached: bool) -> ImageReceipt:
    return ImageReceipt(picture.size, plan.sizes[0], len(plan.sizes), plan.tokens, picture.sha256, cached, picture.notes)
