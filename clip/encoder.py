"""Tiles to embeddings: a tower, or a whole vision family, on its backends."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from mtmd.clip.audio_family import AudioFamily, HasSeparator
from mtmd.clip.family import MarkedFamily, Tower, VisionFamily
from mtmd.clip.grids import PackedGrids
from mtmd.clip.image.device_normalize import normalized, tables
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.instructed import Instructed, InstructedReader
from mtmd.clip.packing import SIZES, Pack, Packs, Strip, all_equal
from mtmd.clip.preprocessing import Preprocessing
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.backends.side_stream import Mark, SideStream
from mtmd.kernels.checkpoint.adapter import Adapter
from mtmd.kernels.checkpoint.halves import in_halves
from mtmd.kernels.graph import Node, Shape, Type, WeightSource, graph_input, weight
from mtmd.kernels.layers import AdaptedWeights, AppliedAdapter
from mtmd.kernels.parallel.shard import Sharding
from mtmd.kernels.plan.executor import Executor, Observer, Residency, finish
from mtmd.kernels.plan.flash_choice import AttentionForm, FlashChoice, choose
from mtmd.kernels.plan.scheduler import Override, Plan, make_plan

BATCH = 4  # tiles encoded at once
ADAPTED = 8  # choices of adapters whose plans are kept
TABLES = 16  # ways of normalising that are kept; a model has two


class TowerEncoder:
    """Flash attention is decided when it is made, by asking about every batch of the tiles that are
    expected.
    """

    name = "encoder"
    """Of its graph, in reports."""
    noun = "image"

    @property
    def separator(self) -> str | None:
        """Return the parameter [D], or [N, D], that stands where an `ImagePlan.order` has -1."""
        return None

    def __init__(
        self,
        family: Tower,
        weights: WeightSource,
        backends: Sequence[Backend],
        *,
        dtype: torch.dtype,
        flash_attn: str = "auto",
        int8: bool = False,
        overrides: Sequence[Override] = (),
        residency: Residency | None = None,
        sharding: Sharding | None = None,
        preprocess: str = "auto",
        adapters: Sequence[Adapter] = (),
        always: Sequence[tuple[Adapter, float]] = (),
    ):
        """`int8`: products of many rows may round activations to 8 bits. `sharding`: this is one
        rank of several, which has a part of the tower. `preprocess`:
        "host" has pictures resized and normalised there, whatever the device can do. `adapters`
        that `adapted` applies; those of `always` change products in every run, each as much as its
        scale says.
        """
        self.adapters, self._applied = tuple(adapters), tuple(always)
        self.sharding = sharding
        self.lead: Callable[[Tensor], AbstractContextManager[None]] | None = None
        """Has the other ranks encode the same pixels."""
        # ranks keep to one order
        self.side, resizing = (
            None if sharding else backends[0].side_stream(use) for use in ("encode", "resize")
        )
        foreseen = sharding is None and resizing is None and backends[0].side_streams
        self.preprocessing = Preprocessing(family.resolution, resizing, preprocess, foreseen)
        self._tables: dict[Normalize, Tensor] = {}
        self.family: Tower = family
        self.weights, self.backends, self.overrides = weights, backends, tuple(overrides)
        self.dtype, self.int8 = dtype, int8
        self.residency = residency or Residency()
        self.flash: FlashChoice = choose(self._probes, backends, overrides, flash_attn)
        self.fallbacks: dict[tuple[int, Shape], Plan] = {}
        """Plans in use in which the preferred backend refused something."""
        few = backends[0].space != "cpu"
        self.strip = Strip(family.cells, few) if isinstance(family, Packs) else None
        """How packs of this family lie; None where it has none. Of use unless `why_no_packs`."""
        self._adapted = lru_cache(maxsize=ADAPTED)(self._make_adapted)
        self._forget_plans()

    def _forget_plans(self) -> None:
        self._pack_plan = lru_cache(maxsize=len(SIZES))(self._make_pack_plan)
        self._pack_executor = lru_cache(maxsize=len(SIZES))(self._make_pack_executor)
        self._plan = lru_cache(maxsize=16)(self._make_plan)
        self._executor = lru_cache(maxsize=16)(self._make_executor)

    def adapted(self, scales: tuple[float, ...]) -> TowerEncoder:
        """The same with each of its adapters as much as its scale says; with none of them where
        there are no scales. Weights and measurements are shared, plans are its own.
        """
        return self._adapted(scales) if any(scales) else self

    def _make_adapted(self, scales: tuple[float, ...]) -> TowerEncoder:
        result = copy.copy(self)
        chosen = zip(self.adapters, scales, strict=True)
        result._applied = (*self._applied, *((a, scale) for a, scale in chosen if scale))
        result._forget_plans()
        return result

    def _adapted_weights(self, only: Collection[int] | None = None) -> AdaptedWeights:
        """Weights of a graph: its runs have all pictures in common that are in them."""

        def scale_of(adapter: Adapter, scale: float) -> Node:
            value = np.full((1, 1), scale, np.float32)
            return graph_input(
                f"inp.adapter.{adapter.name}", (1, 1), torch.float32, lambda _: value
            )

        applied = [AppliedAdapter(one, scale_of(one, scale)) for one, scale in self._applied]
        return AdaptedWeights(self.weights, applied, only)

    def sizes(self) -> dict[str, tuple[int, Type]]:
        """(batch, tile) by label: what the warm-up asks about, and the most that can come."""
        return {
            "warm-up": (1, self.family.resolution.tile_type()),
            "largest": (BATCH, self.family.resolution.largest_tile_type()),
        }

    def graph(
        self,
        batch: int,
        tile: Shape,
        form: AttentionForm | None = None,
        only: Collection[int] | None = None,
    ) -> Node:
        """-> embeddings [B, T, D]; of a rank, its part of the graph. `only`: the layers that it
        has.
        """
        embeddings = self.whole_graph(batch, tile, form, only)
        if self.sharding:
            embeddings = self.sharding.rewrite([embeddings])[0]
        return self._marked(embeddings)

    def whole_graph(
        self,
        batch: int,
        tile: Shape,
        form: AttentionForm | None = None,
        only: Collection[int] | None = None,
    ) -> Node:
        """The graph as if there were one rank."""
        tiles = graph_input("inp.pixels", (batch, *tile), self.dtype, lambda tiles: tiles)
        return self.family.graph(tiles, self._adapted_weights(only), form or self.flash.form)

    def keep_halves(self) -> None:
        """Keep weights of 16 bits as they are stored, for a CPU that computes in fp32. Not on one
        of several ranks, whose shares may begin inside a block.
        """
        if self.sharding:
            return

        def graph(source: WeightSource) -> None:
            self.weights = source
            self.whole_graph(1, self.family.resolution.tile_type().shape)

        self.weights = in_halves(self.weights, graph)

    def plan(self, batch: int, tile: Shape, overwrite: bool = True) -> Plan:
        """The plan of one shape of batch. `overwrite=False` keeps every value intact, for looking
        on.
        """
        return self._plan(batch, tile, overwrite)

    def new_plan(self, batch: int, tile: Shape) -> Plan:
        """The same, not kept: for looking at many shapes."""
        return self._make_plan(batch, tile, True)

    def plan_of_layers(self, graph: Node) -> Plan:
        """The plan of a graph that has some layers: what one launches, all of its kind do."""
        return make_plan([graph], self.backends, self.overrides)

    def _make_plan(self, batch: int, tile: Shape, overwrite: bool) -> Plan:
        return make_plan([self.graph(batch, tile)], self.backends, self.overrides, overwrite)

    def pack_plan(self, tokens: int) -> Plan:
        """The plan of packs of so many tokens."""
        return self._pack_plan(tokens)

    def _make_pack_plan(self, tokens: int) -> Plan:
        return make_plan([self.pack_graph(tokens)], self.backends, self.overrides)

    def pack_graph(self, tokens: int, only: Collection[int] | None = None) -> Node:
        """-> embeddings [1, tokens, D]"""
        strip, family = self.strip, self.family
        assert strip is not None and isinstance(family, Packs)
        shape = 1, *strip.tile(tokens)
        tiles = graph_input("inp.pixels", shape, self.dtype, lambda pack: pack.pixels)
        grids = PackedGrids(tokens, strip.cells, self._evaluated)
        weights = self._adapted_weights(only)
        return self._marked(family.graph_on(grids, tiles, weights, self.flash.form))

    def _marked(self, embeddings: Node) -> Node:
        """The graph with products that round activations, where that was asked for."""
        if not self.int8:
            return embeddings
        from mtmd.kernels.plan.int8_products import TOWER_BITS, marked  # loads LLVM

        return marked([embeddings], TOWER_BITS)[0]

    def _evaluated(self, node: Node) -> Tensor:
        """A value that is made of weights alone."""
        step = make_plan([node], self.backends, self.overrides).steps[-1]
        weights = (i and self.residency.get(i, step.backend) for i in step.inputs)
        return step.backend.lower(step.node)(*weights)

    @cached_property
    def why_no_packs(self) -> str | None:
        """Why tiles of unequal sizes are not encoded together; None where they are."""
        if self.strip is None:
            return "its family encodes tiles of equal size together"
        if self.sharding is not None:
            return "several ranks share the encoder"
        if self.flash.form.all_explicit or self.flash.form.explicit:
            return "without flash attention a pack would take the scores of all pictures at once"
        refused = self.pack_plan(self.strip.sizes[-1]).refusals
        own = [r for r in refused if r.backend == self.backends[0].name]
        return (
            f"{own[0].backend} does not take {own[0].node.name}: {own[0].reason}" if own else None
        )

    def packed(self, shapes: Sequence[Shape]) -> int | None:
        """Tokens of the pack in which tiles of these shapes are encoded; None where they are
        encoded as a batch. Alone a tile is in a pack where there are few sizes of them, unless its
        own is one that comes again.
        """
        if self.strip is None or (all_equal(shapes) and not self._in_pack_alone(shapes[0])):
            return None
        length = self.strip.length(shapes)
        return None if length is None or self.why_no_packs is not None else length

    def _in_pack_alone(self, shape: Shape) -> bool:
        """Every size that is new would have to be planned, and would be launched node by node."""
        assert self.strip is not None
        return self.strip.few and shape not in self._usual

    @cached_property
    def _usual(self) -> frozenset[Shape]:
        return frozenset(tile.shape for _, tile in self.sizes().values())

    def pack_of(self, shapes: Sequence[Shape]) -> list[int]:
        """Return which tiles of these shapes make a pack with the first, as many as there is room
        for, in order; none where it had better be encoded without one.
        """
        if self.strip is None or self.why_no_packs is not None:
            return []
        chosen = self.strip.choose(shapes)
        return chosen if chosen and self.packed([shapes[i] for i in chosen]) is not None else []

    def plan_of(self, shapes: Sequence[Shape], alone: bool = False) -> Plan:
        """The plan by which `steps` encodes tiles of these shapes."""
        tokens = None if alone else self.packed(shapes)
        return self.plan(len(shapes), shapes[0]) if tokens is None else self.pack_plan(tokens)

    @property
    def width(self) -> int:
        """Return how many numbers a token's embedding has."""
        return self.graph(1, self.family.resolution.tile_type().shape).shape[2]

    def weight_plans(self) -> list[Plan]:
        """Return plans that read every weight, once each."""
        return [self.plan(1, self.family.resolution.tile_type().shape)]

    def largest_plans(self) -> list[Plan]:
        """Return the plans of the largest number of tiles at once, and of the largest pack of
        unequal pictures.
        """
        batch, tile = self.sizes()["largest"]
        plans = [self.plan(batch, tile.shape)]
        if self.strip is not None and self.why_no_packs is None:
            plans.append(self.pack_plan(self.strip.sizes[-1]))
        return plans

    def _probes(self, form: AttentionForm) -> list[list[Node]]:
        """Every batch of the tiles that are expected."""
        tiles = dict.fromkeys(tile for _, tile in self.sizes().values())
        return [
            [self.graph(batch, tile.shape, form)] for tile in tiles for batch in range(1, BATCH + 1)
        ]

    def forget_runs(self) -> None:
        """Kernels are asked for anew, as a device may choose others now."""
        self._executor.cache_clear()
        self._pack_executor.cache_clear()

    def _make_executor(self, batch: int, tile: Shape, intact: bool = False) -> Executor:
        return self._executor_of(self.plan(batch, tile, not intact), batch, tile)

    def _make_pack_executor(self, tokens: int) -> Executor:
        assert self.strip is not None
        return self._executor_of(self.pack_plan(tokens), 1, self.strip.tile(tokens))

    def _executor_of(self, plan: Plan, batch: int, tile: Shape) -> Executor:
        if any(r.backend == self.backends[0].name for r in plan.refusals):
            self.fallbacks[batch, tile] = plan
        return Executor(plan, self.residency)

    def steps(
        self,
        tiles: Sequence[np.ndarray],
        observe: Observer | None = None,
        ways: Sequence[Normalize | None] | None = None,
        alone: bool = False,
    ) -> Generator[Mark | None, None, list[Tensor]]:
        """Encode at most `BATCH` tiles [3, Y, X] of equal shape, or groups of frames [3 N, Y, X],
        or tiles that are `packed`, unless they are to be `alone`, in no pack, a node at a time;
        `ways` by which tiles that are bytes become numbers. It yields what is left to wait for,
        where all else is done.

        -> embeddings [T, D] of each, or [D], in the compute type
        """
        ways = ways or [None] * len(tiles)
        shapes = [tuple(tile.shape) for tile in tiles]
        length = None if alone or observe is not None else self.packed(shapes)
        if self.side is not None:
            embeddings = yield from self._alongside(self.side, tiles, observe, ways, length)
        else:
            pixels = self._on_host(tiles, ways, length)
            embeddings = yield from self._run(pixels, observe, shapes if length else None)
            self.backends[0].synchronize()  # so that whoever measures, measures the encoding
        if length is None:
            return list(embeddings.unbind(0))
        assert self.strip is not None
        return self.strip.split(embeddings, shapes)

    def _alongside(
        self,
        side: SideStream,
        tiles: Sequence[np.ndarray],
        observe: Observer | None,
        ways: Sequence[Normalize | None],
        length: int | None,
    ) -> Generator[Mark | None, None, Tensor]:
        """Encode on the side stream: between two nodes the caller's own is the current one."""
        side.follow()
        with side.entered():
            pixels = self._uploaded(side, tiles, ways, length)
        steps = self._run(pixels, observe, [tile.shape for tile in tiles] if length else None)
        try:
            while True:
                try:
                    with side.entered():
                        next(steps)
                except StopIteration as done:
                    embeddings: Tensor = done.value
                    break
                yield None
        finally:
            steps.close()
        with side.entered():
            mark = side.mark()
        while not mark.is_reached():
            yield mark
        side.hand_over(embeddings)
        return embeddings

    def _uploaded(
        self,
        side: SideStream,
        tiles: Sequence[np.ndarray],
        ways: Sequence[Normalize | None],
        length: int | None,
    ) -> Tensor:
        """Bytes are normalised there."""
        known = [way for way in ways if way is not None]
        if (
            self.preprocessing.why_host is not None
            or len(known) < len(tiles)
            or any(tile.dtype != np.uint8 for tile in tiles)
            or (length is not None and len(set(known)) > 1)
        ):
            return self._on_host(tiles, ways, length)

        if length is not None:
            strip = self.strip
            assert strip is not None
            shape = 1, *strip.tile(length)
            pixels = side.upload(shape, lambda host: strip.lay(tiles, host[0]))
            return normalized(pixels, self._table(side, known[0])[None])

        def fill(host: Tensor) -> None:
            for location, tile in zip(host, tiles, strict=True):
                location.numpy()[:] = tile

        pixels = side.upload((len(tiles), *tiles[0].shape), fill)
        return normalized(pixels, torch.stack([self._table(side, way) for way in known]))

    def _table(self, side: SideStream, way: Normalize) -> Tensor:
        """[3, 256] on the device, where it stays: sending it would wait for all before it."""
        if way not in self._tables:
            while len(self._tables) >= TABLES:
                self._tables.pop(next(iter(self._tables)))
            self._tables[way] = tables([way], self.dtype)[0].to(side.device)
        return self._tables[way]

    def numbers(self, plan: ImagePlan) -> list[np.ndarray]:
        """A picture's tiles as the tower would be given them, in fp32, normalised where that is
        done.
        """
        if self.side is None or plan.normalize is None:
            return plan.numbers()
        with self.side.entered(), torch.inference_mode():
            by = tables([plan.normalize], torch.float32).to(self.side.device)
            made = (torch.from_numpy(t)[None].to(self.side.device) for t in plan.tiles)
            return [normalized(tile, by)[0].cpu().numpy() for tile in made]

    def _on_host(
        self,
        tiles: Sequence[np.ndarray],
        ways: Sequence[Normalize | None],
        length: int | None = None,
    ) -> Tensor:
        numbers = (
            way.planes(tile) if way and tile.dtype == np.uint8 else self.pixels(tile)
            for tile, way in zip(tiles, ways, strict=True)
        )
        if length is not None:
            assert self.strip is not None
            pixels = torch.empty(1, *self.strip.tile(length), dtype=self.dtype)
            self.strip.lay(list(numbers), pixels[0])
            return pixels
        pixels = torch.empty(len(tiles), *tiles[0].shape, dtype=self.dtype)
        for line, made in zip(pixels, numbers, strict=True):
            line.copy_(torch.from_numpy(made))
        return pixels

    def pixels(self, tile: np.ndarray) -> np.ndarray:
        """A tile that came without a way to normalise it as the tower reads it, fp32."""
        return tile

    def prepare(self, pixels: Tensor) -> None:
        """Have the weights and the plan for such pixels in memory."""
        self._executor(len(pixels), tuple(pixels.shape[1:]))

    def run(self, pixels: Tensor, observe: Observer | None = None) -> Tensor:
        """pixels [B, 3, Y, X] -> embeddings [B, T, D], or [B, D]"""
        return finish(self._run(pixels, observe))

    def _run(
        self, pixels: Tensor, observe: Observer | None, packed: Sequence[Shape] | None = None
    ) -> Generator[None, None, Tensor]:
        """A node at a time; of several ranks at once, whose collectives have one order. `packed`:
        the tiles that the pixels are a pack of.
        """
        if packed is not None:
            assert self.strip is not None
            tokens = pixels.shape[2] // self.strip.cells.side
            pack = Pack(pixels, self.strip.parts(packed))
            (embeddings,) = yield from self._pack_executor(tokens).steps(pack)
            return embeddings
        # Whoever looks on wants to see the nodes that the family has, and no others in their place.
        looks_on = observe is not None and self.backends[0].fuses
        executor = self._executor(len(pixels), tuple(pixels.shape[1:]), *[True] * looks_on)
        steps = executor.steps(pixels, observe)
        if self.lead is None:
            (embeddings,) = yield from steps
        else:
            with self.lead(pixels):
                (embeddings,) = finish(steps)
        return embeddings

    def encode(
        self,
        tiles: Sequence[np.ndarray],
        observe: Observer | None = None,
        way: Normalize | None = None,
    ) -> list[Tensor]:
        """Embeddings [T, D], or [D], of each tile, in order; tiles fp32 [3, Y, X], or bytes that
        become numbers by `way`; those of equal shape together, at most `BATCH` at once.
        """
        waiting: dict[Shape, list[int]] = {}
        for index, tile in enumerate(tiles):
            waiting.setdefault(tuple(tile.shape), []).append(index)
        done: dict[int, Tensor] = {}
        for indices in waiting.values():
            for start in range(0, len(indices), BATCH):
                part = indices[start : start + BATCH]
                steps = self.steps([tiles[i] for i in part], observe, [way] * len(part), alone=True)
                done.update(zip(part, finish(steps), strict=True))
        return [done[i] for i in range(len(tiles))]

    def separators(self) -> Tensor:
        """[N, D], the rows of `separator`."""
        assert self.separator is not None
        rows: Tensor = self.residency.get(
            weight(self.separator, self.weights, self.dtype), self.backends[0]
        )
        return rows.view(-1, rows.shape[-1])

    def marks(self) -> Mapping[int | str, Tensor]:
        """Return the embeddings [D] of tokens that the family has some of its own for, by the ids
        or the texts of the tokens.
        """
        family: object = self.family
        if not isinstance(family, MarkedFamily):
            return {}
        rows = self.residency.get(weight(family.marks, self.weights, self.dtype), self.backends[0])
        tokens: tuple[int | str, ...] = family.mark_tokens
        return dict(zip(tokens, rows, strict=True))

    def join(self, plan: ImagePlan, tiles: Sequence[Tensor]) -> Tensor:
        """The embeddings [T, D] of the tokens of a picture, or of audio, from those of its
        tiles.
        """
        rows = torch.cat(list(tiles))
        if plan.order is None:
            return rows
        if self.separator is not None:
            rows = torch.cat((rows, self.separators().to(rows.device)))
        order = torch.from_numpy(plan.order).to(rows.device)
        if plan.weights is None:
            return rows[order]  # -1 is the last row: the separator
        weights = torch.from_numpy(plan.weights).to(rows)
        mixed = rows[order[:, 0]] * weights[:, :1]
        for part in range(1, weights.shape[1]):
            mixed += rows[order[:, part]] * weights[:, part : part + 1]
        return mixed


class Encoder(TowerEncoder):
    """The encoder of a vision family, whose embeddings a decoder reads."""

    family: VisionFamily

    def pixels(self, tile: np.ndarray) -> np.ndarray:
        """Frames are kept as bytes until they are encoded: they are many."""
        if tile.dtype != np.uint8:
            return tile
        assert self.family.video is not None
        return self.family.video.pixels(tile)

    @property
    def separator(self) -> str | None:
        return self.family.separator

    @cached_property
    def reader(self) -> InstructedReader | None:
        """Return what makes embeddings of a picture's features and a prompt's text; None for a
        family whose tower gives them.
        """
        family: object = self.family
        if not isinstance(family, Instructed):
            return None
        rows, width = self.whole_graph(1, self.family.resolution.tile_type().shape).shape[1:]
        return InstructedReader(
            family,
            self._adapted_weights(),
            self.backends,
            (rows, width),
            dtype=self.dtype,
            form=self.flash.form,
            overrides=self.overrides,
            residency=self.residency,
        )

    @property
    def width(self) -> int:
        return super().width if self.reader is None else self.reader.graph(1).shape[2]

    def weight_plans(self) -> list[Plan]:
        return [*super().weight_plans(), *([self.reader.plan(1)] if self.reader else ())]


class AudioEncoder(TowerEncoder):
    """The encoder of a family that takes audio, whose embeddings a decoder reads. The first of
    several ranks has it as a whole.
    """

    family: AudioFamily
    name = "audio encoder"
    noun = "audio"

    @property
    def separator(self) -> str | None:
        family: object = self.family
        return family.separator if isinstance(family, HasSeparator) else None

    def widened(self, rows: Tensor, width: int) -> Tensor:
        """Rows [T, D] as the decoder reads those of pictures, [T, width]: layers that get image
        features of their own get nothing of audio.
        """
        return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))
