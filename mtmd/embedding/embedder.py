"""A loaded dual encoder as people use it: pictures and texts in, vectors of one space out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtmd.base.cores import OthersWatch
from mtmd.base.errors import DeviceMemoryError, ModelError, OptionError, PromptError
from mtmd.base.text import mib
from mtmd.checkpoint.facts import CheckpointFacts, facts_of_weights
from mtmd.checkpoint.folder import open_folder
from mtmd.checkpoint.pooling import POOLING, gives_last_state
from mtmd.checkpoint.token_vectors import gives_token_vectors_in
from mtmd.clip.dual.family import FAMILIES
from mtmd.clip.dual.text_encoder import BATCH as TEXTS_AT_ONCE
from mtmd.clip.dual.text_encoder import TextEncoder
from mtmd.clip.encoder import BATCH, TowerEncoder
from mtmd.clip.image.decode import Picture
from mtmd.clip.resolution.resolution import ImagePlan
from mtmd.clip.token_budget import Budget
from mtmd.clip.warmup import check_encoder, encoder_graphs, encoder_placement, preprocessing_facts
from mtmd.embedding.decoder_embedder import DecoderEmbedder
from mtmd.embedding.dual_checkpoint import DualCheckpoint, is_dual_folder, open_dual
from mtmd.embedding.receipt import EmbeddingReceipt, Embeddings, TextReceipt, Vectors
from mtmd.embedding.token_embedder import TokenEmbedder
from mtmd.environment import kernels_from_environment
from mtmd.kernels.backends import Backend, backends_for
from mtmd.kernels.dtype import name_of
from mtmd.kernels.plan.executor import Residency
from mtmd.kernels.plan.free_memory import free_bytes
from mtmd.kernels.plan.graph_replay import recordings_bytes
from mtmd.kernels.plan.scheduler import Override
from mtmd.kernels.report.facts import Placement
from mtmd.kernels.report.machine_facts import computing_threads, machine_facts, thread_warnings
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.resources.default_device import made_on_the_host
from mtmd.kernels.resources.threads import ask_threads, settle_cores
from mtmd.loaded.device_and_dtype import choose_dtype, device_name
from mtmd.loaded.report import attention_kernels, preprocessed_where, refusal_warnings
from mtmd.loaded.vision_attention import ours_only, reported, vision_attention
from mtmd.options.by_name import given, options
from mtmd.options.load import EMBEDDER_OPTIONS, LoadOptions
from mtmd.prompt.load_image import ImageSource, load_image
from mtmd.receipt import ImageReceipt

log = logging.getLogger("mtmd.kernels")

# Characters of a text: its end is cut at the model's context, some hundred tokens, anyway.
MAX_TEXT = 1 << 16


class Embedder:
    """Made by `load_embedder`. Safe to use from several threads.

    `backends` in order of preference replaces what `chosen.device` and `chosen.refuse` ask for;
    `name` is for people. Raises MtmdError.
    """

    def __init__(
        self,
        checkpoint: DualCheckpoint,
        chosen: LoadOptions,
        backends: Sequence[Backend] | None = None,
        name: str | None = None,
    ):
        self.checkpoint, self.options = checkpoint, chosen
        self.name = name or checkpoint.folder.resolve().name
        self.cores = settle_cores()
        if chosen.threads:
            ask_threads(chosen.threads)
        self.backends = list(backends) if backends else backends_for(chosen.device, chosen.refuse)
        ours_only(self.backends)
        if kernels_from_environment() is not None:
            log.warning("MTMD_KERNELS is not used: programs are saved for models that answer")
        self.dtype = choose_dtype(chosen.dtype, self.backends[0], checkpoint.weight_bytes)
        overrides = [Override.parse(o) for o in chosen.override_tensor]
        located: dict[str, Any] = {
            "dtype": self.dtype,
            "flash_attn": chosen.flash_attn,
            "overrides": overrides,
            "residency": Residency(),
        }
        family, weights = checkpoint.family, checkpoint.weights
        self.images = TowerEncoder(
            family.image, weights, self.backends, preprocess=chosen.preprocess, **located
        )
        self.texts = TextEncoder(family.text, weights, self.backends, **located)
        self._scale, self._bias = self._score_terms()
        self._lock = Lock()
        self._check_overrides(overrides)
        self._check_memory()

    @property
    def width(self) -> int:
        """Numbers in a vector."""
        return self.checkpoint.family.width

    @property
    def context(self) -> int:
        """Tokens that are read of a text."""
        return self.checkpoint.family.text.context

    @property
    def facts(self) -> CheckpointFacts:
        """Return what the model's files say of themselves."""
        checkpoint = self.checkpoint
        return facts_of_weights([checkpoint.weights], checkpoint.architecture, self.width)

    def is_cut(self, text: str) -> bool:
        """Return whether a text is not read to its end."""
        return self.checkpoint.tokens(text)[1]

    def weights_read(self) -> tuple[int, int]:
        """Bytes of weights that are where they are needed, and of all of them."""
        return sum(dict(self.images.residency.bytes).values()), self._weight_bytes

    def embed(
        self,
        images: ImageSource | Picture | Sequence[ImageSource | Picture] = (),
        texts: str | Sequence[str] = (),
        *,
        normalize: bool = True,
    ) -> Vectors:
        """Vectors fp32 [N, D] of images, then of texts, in the order given; of length 1 with
        `normalize`, so that a product of two is their cosine.

        images: paths, bytes of files, Pillow images, uint8 arrays [Y, X, 3]. Raises ImageError,
        PromptError.
        """
        return self.embeddings(images, texts, normalize=normalize).vectors

    @made_on_the_host()
    def embeddings(
        self,
        images: ImageSource | Picture | Sequence[ImageSource | Picture] = (),
        texts: str | Sequence[str] = (),
        *,
        normalize: bool = True,
    ) -> Embeddings:
        """Do what `embed` does, with a receipt."""
        watch = _Watch()
        seen: list[ImageReceipt] = []
        plans: list[ImagePlan] = []
        read: list[TextReceipt] = []
        vectors = [
            *self._image_vectors(_pictures(images), seen, plans, watch),
            *self._text_vectors(_texts(texts), read, watch),
        ]
        if not vectors:
            raise OptionError("found neither images nor texts, expected some of either")
        stacked = torch.stack(vectors)
        if normalize:
            stacked = torch.nn.functional.normalize(stacked, dim=-1)
        return Embeddings(stacked.numpy(), self._receipt(seen, plans, read, watch))

    def similarity(
        self, images: ImageSource | Sequence[ImageSource], texts: str | Sequence[str]
    ) -> Vectors:
        """Cosines fp32 [images, texts]."""
        result: Vectors = self.embed(images) @ self.embed(texts=texts).T
        return result

    def classify(
        self, images: ImageSource | Sequence[ImageSource], labels: Sequence[str]
    ) -> Vectors:
        """The probability of each label for each image, fp32 [images, labels]: of CLIP they sum to
        1 over the labels, of SigLIP each stands for itself.
        """
        return self.probabilities(self.similarity(images, labels))

    @made_on_the_host()
    def probabilities(self, cosines: Vectors) -> Vectors:
        """Return probabilities from cosines [images, texts], as the model was trained to tell."""
        scores = torch.from_numpy(cosines) * self._scale + self._bias
        exclusive = self.checkpoint.family.exclusive
        result: Vectors = (scores.softmax(-1) if exclusive else scores.sigmoid()).numpy()
        return result

    @property
    def warmup_report(self) -> WarmupReport:
        """Return where everything runs and what it will take. Nothing is run for it: `warm_up`
        does.
        """
        return self._report(check=False)

    def warm_up(self) -> WarmupReport:
        """The report with a real picture and a real text encoded: times, and every op against its
        reference.
        """
        with self._lock:
            return self._report(check=True)

    def _image_vectors(
        self,
        sources: Sequence[ImageSource | Picture],
        seen: list[ImageReceipt],
        plans: list[ImagePlan],
        watch: _Watch,
    ) -> Iterator[Tensor]:
        """`plans` get what was made of the pictures, less their tiles."""
        resolution, ways = self.checkpoint.family.image.resolution, self.images.preprocessing
        for start in range(0, len(sources), BATCH):
            with watch.preprocess:
                tiles: list[np.ndarray] = []
                for number, source in enumerate(sources[start : start + BATCH], start + 1):
                    picture = (
                        source
                        if isinstance(source, Picture)
                        else load_image(source, unnamed=f"image {number}")
                    )
                    plan = ways.prepare(partial(resolution.prepare, picture.pixels))
                    tiles += plan.tiles
                    plans.append(replace(plan, tiles=()))
                    seen.append(
                        ImageReceipt(
                            picture.size,
                            plan.sizes[0],
                            1,
                            plan.tokens,
                            picture.sha256,
                            False,
                            (*picture.notes, *plan.notes),
                        )
                    )
            with watch.encode, self._lock:
                vectors = self.images.encode(tiles, way=resolution.normalize)
            yield from (v.float().cpu() for v in vectors)

    def _text_vectors(
        self, texts: Sequence[str], read: list[TextReceipt], watch: _Watch
    ) -> Iterator[Tensor]:
        for start in range(0, len(texts), TEXTS_AT_ONCE):
            with watch.preprocess:
                ids = []
                for text in texts[start : start + TEXTS_AT_ONCE]:
                    tokens, cut = self.checkpoint.tokens(text)
                    ids.append(tokens)
                    read.append(TextReceipt(len(tokens), cut))
            with watch.encode, self._lock:
                vectors = self.texts.encode(ids)
            yield from vectors.float().cpu().unbind(0)

    def _receipt(
        self,
        seen: list[ImageReceipt],
        plans: list[ImagePlan],
        read: list[TextReceipt],
        watch: _Watch,
    ) -> EmbeddingReceipt:
        placements = encoder_placement(self.images), self.texts.placement()
        cut = [f"text {i}" for i, text in enumerate(read, 1) if text.cut]
        warnings = [] if not cut else [_cut_warning(cut, self.checkpoint.family.text.context)]
        return EmbeddingReceipt(
            self.name,
            tuple(seen),
            tuple(read),
            watch.preprocess.ms,
            watch.encode.ms,
            self.backends[0].name,
            name_of(self.dtype),
            self._attention(placements),
            (
                *refusal_warnings(placements),
                *thread_warnings(self.backends[0], self.cores),
                *warnings,
            ),
            preprocessed_where(self.images, plans),
        )

    def _attention(self, placements: tuple[Placement, Placement]) -> dict[str, str]:
        result, by = attention_kernels(placements), reported(self.images)
        graph = placements[0].flash.graph
        return {**result, graph: f"{result[graph]}, by {by}"} if by else result

    @made_on_the_host()
    def _report(self, check: bool) -> WarmupReport:
        watch = OthersWatch() if check else None
        checks = (check_encoder(self.images), self.texts.check()) if check else ()
        placements = encoder_placement(self.images), self.texts.placement()
        report = WarmupReport(
            self.name,
            self.backends[0].name,
            device_name(self.backends[0]),
            name_of(self.dtype),
            tuple(p.flash for p in placements),
            tuple(r for p in placements for r in p.refused),
            (*encoder_graphs(self.images), *self.texts.graphs()),
            checks=checks,
            vision_attention=vision_attention(self.images, Budget(), False),
            preprocessing=preprocessing_facts(self.images, check),
        )
        device, threads = self.backends[0], computing_threads()
        return replace(report, machine=machine_facts(device, self.cores, threads, watch, report))

    def _score_terms(self) -> tuple[float, float]:
        """Return what a cosine is multiplied by, and what is added."""
        weights, exclusive = self.checkpoint.weights, self.checkpoint.family.exclusive
        scale = weights.read("logit_scale", torch.float32).exp().item()
        return scale, 0.0 if exclusive else weights.read("logit_bias", torch.float32).item()

    def _check_overrides(self, overrides: Sequence[Override]) -> None:
        tile = self.checkpoint.family.image.resolution.tile_type().shape
        plans = self.images.plan(1, tile), self.texts.plan(1, self.checkpoint.family.text.context)
        nodes = [s.node for p in plans for s in p.steps if s.node.op != "copy"]
        for override in overrides:
            if not any(override.matches(node) for node in nodes):
                raise OptionError(
                    f"override {override.pattern.pattern!r} matches no node or weight of "
                    f"{self.name}"
                )

    def _check_memory(self) -> None:
        """Raises DeviceMemoryError before a weight is read where it all does not fit."""
        preferred = self.backends[0]
        free, space = free_bytes(preferred), preferred.space
        graphs = [*encoder_graphs(self.images), *self.texts.graphs()]
        towers = {g.graph: g.weight_bytes.get(space, 0) for g in graphs}
        self._weight_bytes = sum(towers.values())
        needed = self._weight_bytes + max(g.compute_bytes.get(space, 0) for g in graphs)
        needed += 2 * preferred.queue_bytes * (1 + preferred.records)  # of pictures, and of texts
        if preferred.records:
            texts = [self.texts.plan(TEXTS_AT_ONCE, self.texts.tower.context)]
            for plans in (self.images.largest_plans(), texts):
                needed += recordings_bytes((plan, 1) for plan in plans).get(space, 0)
        resizing = self.images.preprocessing.device_bytes
        if free is not None and needed + resizing > free:
            instead = "--preprocess host, " if needed <= free else ""
            raise DeviceMemoryError(
                f"{self.name} needs {mib(needed + resizing)} on {preferred.name}, which has "
                f"{mib(free)} free; use {instead}--dtype bf16 or another device"
            )


def load_embedder(
    model: str | PathLike[str], *, progress: bool = False, **chosen: Any
) -> Embedder | DecoderEmbedder | TokenEmbedder:
    """A dual encoder (CLIP, SigLIP, SigLIP 2) or an embedding model made of a decoder
    (Qwen3-VL-Embedding; ColQwen2 and ColPali, which give a vector for each token) from a checkpoint
    folder or, as org/name, from the Hugging Face hub.

    `chosen`: device, dtype, flash_attn, override_tensor, refuse, threads and preprocess of
    `LoadOptions`.
    Raises MtmdError: ModelError for the checkpoint, OptionError for an option.
    """
    settings = options(LoadOptions, chosen)
    for name in given(chosen):
        if name not in EMBEDDER_OPTIONS:
            raise OptionError(
                f"option {name!r:.60} is not one of a dual encoder; expected one of "
                f"{', '.join(EMBEDDER_OPTIONS)}"
            )
    from mtmd.checkpoint.hub import is_demo, resolve_model

    if is_demo(model):
        raise ModelError(
            "the demo model writes answers and is no dual encoder; expected one, such as "
            "openai/clip-vit-base-patch32"
        )
    result = resolve_model(model, progress)
    local = result.path.resolve().name == str(model).rstrip("/").rpartition("/")[2]
    called = None if local else str(model)
    with made_on_the_host():
        if result.path.is_dir() and is_dual_folder(result.path):
            return Embedder(open_dual(result.path), settings, name=called)
        if result.path.is_dir() and gives_last_state(result.path):
            return DecoderEmbedder(open_folder(result.path, answers=False), settings, name=called)
        if result.path.is_dir() and gives_token_vectors_in(result.path):
            return TokenEmbedder(open_folder(result.path, answers=False), settings, name=called)
    raise ModelError(
        f"{model} is no dual encoder; expected a checkpoint folder of model_type "
        f"{', '.join(FAMILIES)}, or an embedding model with {POOLING}; `mtmd describe` takes "
        "models that answer"
    )


class _Clock:
    """Adds up the time spent inside."""

    def __init__(self) -> None:
        self.ms = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.ms += (time.perf_counter() - self._start) * 1e3


class _Watch:
    def __init__(self) -> None:
        self.preprocess, self.encode = _Clock(), _Clock()


def _pictures(images: Any) -> list[Any]:
    """One picture, or a list or tuple of them: an array is one."""
    return list(images) if isinstance(images, (list, tuple)) else [images]


def _texts(texts: str | Sequence[str]) -> list[str]:
    given = [texts] if isinstance(texts, str) else list(texts)
    for number, text in enumerate(given, 1):
        if not isinstance(text, str):
            raise PromptError(
                f"text {number}: found an object of type {type(text).__name__}, expected a text"
            )
        if len(text) > MAX_TEXT:
            raise PromptError(
                f"text {number}: found {len(text)} characters, expected at most {MAX_TEXT}"
            )
    return given


def _cut_warning(texts: list[str], context: int) -> str:
    shown = ", ".join(texts[:3]) + (f" and {len(texts) - 3} more" if len(texts) > 3 else "")
    return f"{shown}: the end is not seen, the model reads {context} tokens"
