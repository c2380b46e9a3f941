"""`fit`: the ways in which a model can lie in the memories there are, in order of preference, what
each would need, and the first that fits. Plans tell; nothing is allocated and no weight read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from mtmd.base.errors import DeviceMemoryError, MtmdError, OptionError
from mtmd.base.text import mib, plural
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.clip.encoder import Encoder
from mtmd.clip.token_budget import Budget
from mtmd.kernels.backends import Backend
from mtmd.kernels.parallel.shard import Member
from mtmd.kernels.quantization.blocks import BLOCKS, row_bytes
from mtmd.kernels.report.facts import FitFacts, LayersFacts, LayoutFacts, MemoryFacts
from mtmd.loaded.fitting.layouts import Graphs, Layout, make_graphs, over_layers
from mtmd.loaded.fitting.needed_memory import (
    HOST,
    MAX_ANSWERS,
    Bytes,
    LargestPicture,
    NeededMemory,
    Parts,
    longest_that_fits,
    max_that_fit,
    smaller_picture,
)
from mtmd.loaded.fitting.pictures import Pictures
from mtmd.options.load import LoadOptions

SMALLER = (2048, 1024, 512, 256, 128, 64)  # tokens of a picture, where the largest does not fit
QUANTIZED = ("Q8_0", "Q4_K")


@dataclass
class Way:
    """A model in one layout: `members` are the processes that share it, one for each rank."""

    name: str
    layout: Layout
    members: Sequence[NeededMemory]
    available: Bytes
    pictures: Pictures

    def parts(
        self,
        context: int | None = None,
        answers: int | None = None,
        picture: LargestPicture | None = None,
        *,
        text: bool = False,
    ) -> dict[str, Parts]:
        """Return the parts by memory, beside the largest picture that the context holds, or another
        one; with `text`, beside none.
        """
        if not text:
            picture = picture or self.pictures.at(context or self.pictures.context)
        total = dict[str, Parts]()
        for member in self.members:
            encode = member.encode(picture.tiles) if picture else None
            for space, parts in member.parts(context, answers, encode).items():
                total[space] = parts.plus(total.get(space, Parts()))
        return total

    def slack(
        self,
        context: int | None = None,
        answers: int | None = None,
        picture: LargestPicture | None = None,
        saved: Bytes | None = None,
        *,
        text: bool = False,
    ) -> int:
        """Bytes that are left of the fullest memory of a known size, with `saved` bytes less in
        each; negative where it does not fit.
        """
        saved = saved or {}
        parts = self.parts(context, answers, picture, text=text)
        left = [left + saved.get(space, 0) for space, left in self._left(parts).items()]
        return min(left, default=0)

    def _left(self, parts: Mapping[str, Parts]) -> dict[str, int]:
        """Bytes, of memories of a known size."""
        return {s: self.available[s] - p.total for s, p in parts.items() if s in self.available}

    @property
    def answers(self) -> int:
        """Number of answers at once, as requested."""
        return self.members[0].runner.sequences

    @cached_property
    def on_host(self) -> int:
        """Bytes of weights and of caches that lie there."""
        parts = self.parts().get(HOST, Parts())
        return parts.weights + parts.tower + parts.cache

    @cached_property
    def fits(self) -> bool:
        return self.slack() >= 0

    def longest_context(self, maximum: int) -> int:
        """Up to `maximum`, the model's own limit, as `longest_that_fits` looks for it."""
        return self._longest(maximum, self.pictures.min_context)

    def longest_text(self, maximum: int) -> int:
        """Do what `longest_context` does, without pictures."""
        return self._longest(maximum, 1, text=True)

    def _longest(self, maximum: int, minimum: int, *, text: bool = False) -> int:
        own = self.members[0].runner.context

        def slack(context: int) -> int:
            minimum = self._min_slack(context, text=text) if context > own else 0
            return self.slack(context, text=text) if minimum >= 0 else minimum

        return longest_that_fits(slack, maximum, own, minimum)

    def lacks_for_pictures(self) -> tuple[int, str]:
        """Bytes that the fullest memory has too few, and which it is, for one answer in the
        shortest context with a picture.
        """
        left = self._left(self.parts(self.pictures.min_context, 1))
        return max(((-size, space) for space, size in left.items()), default=(0, ""))

    def _min_slack(self, context: int, *, text: bool = False) -> int:
        """Return it at most what `slack` is for a longer context than the one asked for, without a
        plan: what is computed with grows, too.
        """
        own = self.parts(text=text)
        grown: dict[str, int] = {}
        for member in self.members:
            for space, size in member.cache(context).items():
                grown[space] = grown.get(space, 0) + size
        left = [
            self.available[space] - parts.total + parts.cache - grown.get(space, 0)
            for space, parts in own.items()
            if space in self.available
        ]
        return min(left, default=0)

    def most_answers(self) -> int:
        """Return it with room for the cache of each, also where memory is handed out as it is
        written.
        """
        members = [
            NeededMemory(member.encoder, member.runner, member.audio) for member in self.members
        ]
        whole = replace(self, members=members)
        return max_that_fit(lambda count: whole.slack(None, count), MAX_ANSWERS)

    def facts(self, max_context: int | None = None) -> LayoutFacts:
        """Return it with the longest context, and the most answers, where `max_context` is
        given.
        """
        longest = None if max_context is None else self.longest_context(max_context)
        text = None
        if max_context is not None and longest == 0 and self.pictures.encoder is not None:
            text = self.longest_text(max_context)
        return LayoutFacts(
            self.name,
            tuple(
                MemoryFacts(
                    space,
                    parts.weights,
                    parts.tower,
                    parts.cache,
                    parts.compute,
                    self.available.get(space),
                )
                for space, parts in self.parts().items()
                if parts.total
            ),
            layers_facts(self.layout, self.members[0].encoder is not None),
            self.layout.ranks,
            self.layout.cache_on_host,
            None,
            longest,
            None if max_context is None else self.most_answers(),
            text,
        )


def layers_facts(layout: Layout, sees: bool) -> tuple[LayersFacts, ...]:
    """Return which layers each device has; empty where one has all."""
    if layout.split is None:
        return ()
    return tuple(
        LayersFacts(device.name, run[0], run[-1], sees and device is layout.tower)
        for device, run in zip(layout.split.devices, layout.split.runs, strict=True)
    )


@dataclass
class Ways:
    """All ways for a model on these backends: accelerators, the CPU, the reference. `available`
    are bytes by memory; one that is not there is taken for large enough. `size` (width, height) is
    of the pictures to be shown, None for the largest that the model takes.
    """

    checkpoint: Checkpoint
    chosen: LoadOptions
    context: int
    dtype: torch.dtype
    backends: Sequence[Backend]
    available: Mapping[str, int]
    size: tuple[int, int] | None = None
    may_share: bool = True
    """Whether several processes may: what they run on is numbered from 0."""
    lazy: Sequence[str] = ()
    refused: list[LayoutFacts] = field(default_factory=list)
    """Ways that cannot be, with the reason."""

    @cached_property
    def accelerators(self) -> list[Backend]:
        every = {b.space: b for b in reversed(self.backends)}
        return [b for b in reversed(every.values()) if b.space != HOST]

    @cached_property
    def host(self) -> list[Backend]:
        return [b for b in self.backends if b.space == HOST]

    @cached_property
    def budget(self) -> Budget:
        return Budget(self.chosen.image_min_tokens, self.chosen.image_max_tokens)

    @cached_property
    def roomiest(self) -> Backend:
        """The accelerator with most memory available, the first of equal ones; the host where there
        is none.
        """
        return max(
            self.accelerators or self.host[:1], key=lambda b: self.available.get(b.space, 1 << 60)
        )

    @cached_property
    def alone(self) -> Way:
        """Return the layout on one device."""
        layout, needed = self._on_one
        name = f"on {self.roomiest.name} alone"
        return Way(name, layout, [needed], self.available, self.pictures)

    @cached_property
    def _on_one(self) -> tuple[Layout, NeededMemory]:
        layout = self._on(self.roomiest)
        return layout, NeededMemory(*self._graphs(layout), self.lazy)

    def _on(self, device: Backend, cache_on_host: bool = False, ranks: int = 1) -> Layout:
        """Other accelerators are there for those alone who place nodes on them by name."""
        fallback = [b for b in self.host if b is not device]
        others = [b for b in self.accelerators if b is not device]
        named = others if self.chosen.override_tensor else []
        return Layout((device, *fallback, *named), cache_on_host=cache_on_host, ranks=ranks)

    @property
    def encoder(self) -> Encoder | None:
        return self._on_one[1].encoder

    @cached_property
    def pictures(self) -> Pictures:
        return Pictures(self.encoder, self.budget, self.context, self.size)

    @property
    def picture(self) -> LargestPicture | None:
        """Do what `Pictures.own` does."""
        return self.pictures.own

    def _graphs(self, layout: Layout, member: Member | None = None) -> Graphs:
        return make_graphs(self.checkpoint, self.chosen, self.context, self.dtype, layout, member)

    def _way(self, name: str, layout: Layout, members: Sequence[NeededMemory] = ()) -> Way:
        if not members:
            members = [NeededMemory(*self._graphs(layout), self.lazy)]
        return Way(name, layout, members, self.available, self.pictures)

    def each(self) -> Iterator[Way]:
        """Yield it in order of preference; each is made when it is asked for. Of those with a part
        on the host, the slowest to read, that with the least there comes first.
        """
        yield self.alone
        cards = self.accelerators
        names = ", ".join(card.name for card in cards)
        if len(cards) > 1:
            yield from self._layers(f"layers over {names}", cards)
            if self.may_share:
                yield from self._shared(len(cards))
        if cards and self.host:
            yield from sorted(self._with_host(), key=lambda way: way.on_host)

    def _with_host(self) -> Iterator[Way]:
        cards = self.accelerators
        names = ", ".join(card.name for card in cards)
        yield self._way(
            f"on {self.roomiest.name}, keys and values on the host",
            self._on(self.roomiest, cache_on_host=True),
        )
        if len(cards) > 1:
            name = f"layers over {names}, keys and values on the host"
            yield from self._layers(name, cards, True)
        yield from self._layers(f"layers over {names} and the host", [*cards, self.host[0]])
        yield self._way("on the host alone", self._on(self.host[0]))

    def _layers(
        self, name: str, devices: Sequence[Backend], cache_on_host: bool = False
    ) -> Iterator[Way]:
        try:
            layout = self.over_layers(devices, cache_on_host)
        except OptionError as error:
            self.refused.append(LayoutFacts(name, reason=str(error)))
            return
        yield self._way(name, layout)

    def over_layers(
        self, devices: Sequence[Backend], cache_on_host: bool = False, shares: Sequence[float] = ()
    ) -> Layout:
        """Raises OptionError where layers cannot lie so."""
        needed = self._on_one[1]
        return over_layers(
            needed,
            Layout((*self.accelerators, *self.host), cache_on_host=cache_on_host),
            devices,
            self.available,
            needed.encode(self.picture.tiles) if self.picture else {},
            shares,
        )

    def _shared(self, ranks: int) -> Iterator[Way]:
        name = f"tensor parallelism of {ranks} ranks"
        members = []
        try:
            for rank, card in enumerate(self.accelerators):
                graphs = self._graphs(self._on(card, ranks=ranks), Member(rank, ranks))
                members.append(NeededMemory(*graphs, self.lazy))
        except MtmdError as error:
            self.refused.append(LayoutFacts(name, reason=str(error)))
            return
        yield self._way(name, self._on(self.accelerators[0], ranks=ranks), members)


def choose(ways: Ways) -> tuple[Way, FitFacts]:
    """The first way that fits, and what was looked at up to it. Raises DeviceMemoryError, with what
    would fit, where none does.
    """
    tried: list[Way] = []
    for way in ways.each():
        tried.append(way)
        if way.fits:
            layouts = (*(t.facts() for t in tried), *ways.refused)
            one_cache = tuple(ways.lazy) if ways.chosen.parallel > 1 else ()
            return way, FitFacts(layouts, way.name, one_cache)
    raise DeviceMemoryError(nothing_fits(ways, tried))


def nothing_fits(ways: Ways, tried: Sequence[Way]) -> str:
    """Return what each way lacks, and what would fit."""
    lacking = []
    for way in tried:
        short = way.facts().shortest
        if short is not None:
            there = mib(short.available or 0)
            lacking.append(f"{way.name} needs {mib(short.needed)} of {short.space}'s {there}")
    advice = what_would_fit(ways, tried)
    return (
        f"fit: {ways.context} tokens of context for {ways.chosen.parallel} at once fit nowhere; "
        f"{'what would: ' + ', or '.join(advice) if advice else NOTHING}. "
        f"Refused: {'; '.join(lacking)}"
    )


NOTHING = "a shorter context, smaller or no pictures or a Q4_K file alone would not fit either"


def what_would_fit(ways: Ways, tried: Sequence[Way]) -> list[str]:
    """A shorter context, fewer answers at once, smaller pictures, a quantized file: each that
    alone would do; text without pictures, where more of it fits than with them, and what pictures
    lack where none fit.
    """
    advice = []
    if longest := max((way.longest_context(ways.context) for way in tried), default=0):
        advice.append(f"a context of {longest}")
    if fewest := max((way.most_answers() for way in tried), default=0):
        advice.append(f"{fewest} at once (--parallel)")
    encoder = ways.encoder
    if encoder is not None and ways.picture is not None:
        for tokens in (t for t in SMALLER if t < ways.picture.tokens):
            smaller = smaller_picture(encoder, ways.budget, tokens)
            if smaller and any(way.slack(None, None, smaller) >= 0 for way in tried):
                advice.append(f"pictures of {plural(tokens, 'token')} (--image-max-tokens)")
                break
    for kind in QUANTIZED:
        if any(way.slack(saved=saved_by(way, kind)) >= 0 for way in tried):
            advice.append(f"a {kind} file")
            break
    if encoder is not None:
        advice += _text_alone(ways, tried, longest)
    return advice


def _text_alone(ways: Ways, tried: Sequence[Way], longest: int) -> Iterator[str]:
    """`longest`: context with pictures."""
    text = max((way.longest_text(ways.context) for way in tried), default=0)
    if text <= longest:
        return
    shorter = "" if text == ways.context else f" in a context of {text}"
    lacking = ""
    if not longest:
        size, space = min(way.lacks_for_pictures() for way in tried)
        one = f" of {ways.size[0]} x {ways.size[1]} pixels" if ways.size else ""
        if size > 0:  # else it is the number of answers that leaves them no room
            lacking = f" (a picture{one} needs {mib(size)} more of {space})"
    yield f"text without pictures{shorter}{lacking}"


def saved_by(way: Way, kind: str) -> dict[str, int]:
    """Bytes that a decoder's weights would take less in blocks of a type, by memory."""
    saved: dict[str, int] = {}
    for member in way.members:
        seen = set()
        for node, space in member.runner.plan(member.runner.sizes()["decode"]).leaves:
            plain = node.op == "weight" and node.dtype.is_floating_point
            if not plain or (node.name, space) in seen:
                continue
            seen.add((node.name, space))
            width = node.shape[-1]
            if len(node.shape) < 2 or width % BLOCKS[kind].values:
                continue
            rows = node.type.bytes // (width * node.dtype.itemsize)
            less = node.type.bytes - rows * row_bytes(kind, width)
            saved[space] = saved.get(space, 0) + less
    return saved


def chosen_by(way: Way, chosen: LoadOptions) -> LoadOptions:
    """The options that say the same as a way."""
    return replace(
        chosen,
        fit=False,
        split="layer" if way.layout.split else "none",
        tp=way.layout.ranks,
        no_kv_offload=way.layout.cache_on_host,
    )
