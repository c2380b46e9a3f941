"""The batching bridge: pictures and a rendered prompt become spans that the decoder reads.

Pictures are prepared, encoded in batches of equal tiles, and put where the chat template left their marker. Encoded pictures are
remembered by their content: pixels and size, and the budget they were given, for this model in this compute type; never by path or name.
"""
from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

from mtmd.clip.budget import DEFAULT_BUDGET, Budget
from mtmd.clip.encoder import Encoder
from mtmd.clip.family import ImagePlan
from mtmd.clip.image import Picture
from mtmd.kernels.errors import PromptError
from mtmd.kernels.executor import Observer
from mtmd.llm.sequence import Span
from mtmd.llm.tokenizer import Tokenizer
from mtmd.receipt import ImageReceipt

CACHE_BYTES = 256 << 20
Key: TypeAlias = "tuple[str, Budget]"


@dataclass(frozen=True)
class Encoded:
    """A picture's embeddings [T, D] and what its receipt says."""
    plan: ImagePlan
    embeddings: Tensor
    receipt: ImageReceipt


class Encoding:
    """Pictures on their way to embeddings: iterate for (tiles done, tiles in all), then read `found` and the times in milliseconds."""

    def __init__(self, bridge: Bridge, pictures: Sequence[Picture], budget: Budget, observe: Observer | None = None):
        self.found: list[Encoded] = []
        self.prepare_ms = self.encode_ms = 0.0
        self._bridge, self._pictures, self._budget, self._observe = bridge, pictures, budget, observe

    def __iter__(self) -> Iterator[tuple[int, int]]:
        bridge, clock = self._bridge, time.perf_counter()
        keys = [(p.sha256, self._budget) for p in self._pictures]
        known = {} if self._observe else {key: entry for key in keys if (entry := bridge.known(key))}
        plans = {key: bridge.encoder.family.prepare(p.pixels, self._budget)
                 for key, p in zip(keys, self._pictures, strict=True) if key not in known}
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
        entries = known | {key: (plan, bridge.encoder.join(plan, [next(ordered) for _ in plan.tiles])) for key, plan in plans.items()}
        for key in keys:
            bridge.remember(key, entries[key])
        seen = set(known)  # the second of two equal pictures costs nothing either
        for key, picture in zip(keys, self._pictures, strict=True):
            self.found.append(Encoded(*entries[key], _receipt(picture, entries[key][0], key in seen)))
            seen.add(key)


class Bridge:
    def __init__(self, encoder: Encoder, tokenizer: Tokenizer, device: torch.device):
        self.encoder, self.tokenizer, self.device = encoder, tokenizer, device
        self._cache: OrderedDict[Key, tuple[ImagePlan, Tensor]] = OrderedDict()
        self._lock = Lock()

    def encode(self, pictures: Sequence[Picture], budget: Budget = DEFAULT_BUDGET, observe: Observer | None = None) -> Encoding:
        """Start on the pictures; iterate over what is returned to do the work. Each different picture is encoded once, and where somebody
        observes, even if it is remembered."""
        return Encoding(self, pictures, budget, observe)

    def known(self, key: Key) -> tuple[ImagePlan, Tensor] | None:
        with self._lock:
            return self._cache.get(key)

    def remember(self, key: Key, entry: tuple[ImagePlan, Tensor]) -> None:
        """The most recently used come last; the oldest go when there is too much."""
        plan = replace(entry[0], tiles=(), order=None)  # pixels are not needed again
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
        return _to_spans(self.tokenizer.encode_prompt(text), self.tokenizer.id(family.image_token), encoded, family.bidirectional,
                         self.device)


def _to_spans(tokens: list[int], image_token: int, encoded: Sequence[Encoded], block: bool, device: torch.device) -> list[Span]:
    """Runs of text, and of image tokens, which take the pictures' embeddings in order."""
    spans, start, waiting = [], 0, _Waiting(encoded, device)
    while start < len(tokens):
        stop, is_image = start, tokens[start] == image_token
        while stop < len(tokens) and (tokens[stop] == image_token) == is_image:
            stop += 1
        run = tuple(tokens[start:stop])
        spans += waiting.take(run, block) if is_image else [Span(run)]
        start = stop
    waiting.check_empty()
    return spans


class _Waiting:
    """Pictures whose embeddings are still to be put in, the first of them perhaps in part."""

    def __init__(self, encoded: Sequence[Encoded], device: torch.device):
        self._left = [(e.embeddings.to(device), list(e.plan.grids)) for e in encoded]
        self._count = len(encoded)

    def take(self, run: tuple[int, ...], block: bool) -> list[Span]:
        """A run of image tokens as spans, one for each picture and grid that it shows."""
        spans = []
        while run:
            if not self._left:
                raise PromptError(f"the chat template wrote image tokens for more than {self._count} pictures; it does not fit this model")
            rows, grids = self._left.pop(0)
            grid = grids.pop(0) if grids else None
            count = min(len(run), len(rows) if grid is None else grid[0] * grid[1])
            if grid is not None and count < grid[0] * grid[1]:
                raise PromptError(f"{grid[0]} x {grid[1]} image tokens of a picture do not stand together in the prompt; "
                                  "the tokenizer does not fit this model")
            spans.append(Span(run[:count], rows[:count], block, grid))
            run = run[count:]
            if count < len(rows):
                self._left.insert(0, (rows[count:], grids))
        return spans

    def check_empty(self) -> None:
        if self._left:
            raise PromptError(f"the prompt has fewer image tokens than its {self._count} pictures take; "
                              "the tokenizer does not fit this model")


def _receipt(picture: Picture, plan: ImagePlan, cached: bool) -> ImageReceipt:
    return ImageReceipt(picture.size, plan.sizes[0], len(plan.sizes), plan.tokens, picture.sha256, cached, (*picture.notes, *plan.notes))
