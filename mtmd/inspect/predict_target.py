"""Describes what a model would do on a GPU that is not here."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch

from mtmd.base.errors import OptionError
from mtmd.base.options import size_or_none
from mtmd.bench.shapes import random_checkpoint, type_of_random_weights
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.finding import find_checkpoint
from mtmd.inspect.predict_ranks import shared_out
from mtmd.inspect.prediction import GraphOps, Needs, Prediction, card_facts, facts_of, usable_bytes
from mtmd.inspect.prediction_text import render_prediction
from mtmd.inspect.ranks_facts import LinkFacts
from mtmd.kernels.backends import Cpu, Reference
from mtmd.kernels.backends.target import MIN_CAPABILITY, Target
from mtmd.kernels.estimate.cards import find_card
from mtmd.kernels.estimate.roofline import shares
from mtmd.kernels.gpu.jit import INSTALL, has_triton
from mtmd.kernels.plan.scheduler import Plan
from mtmd.kernels.report.compiled import compiled_kernels
from mtmd.model import Model
from mtmd.options.by_name import given, options
from mtmd.options.load import LoadOptions

NO_USE = (  # of a device that is here
    *("device", "refuse", "threads", "memory_limit", "isolate", "allow_remote_media"),
    *("kernels", "vision_attention", "no_graphs", "activations"),
)


class PredictionReport(Prediction):
    """Describes what `predict` finds out, and `str()` of it as text for a terminal."""

    def __str__(self) -> str:
        return render_prediction(self)


def predict(
    target: str,
    model: str | PathLike[str] | None = None,
    *,
    memory: int | str | None = None,
    random_weights: str | None = None,
    compile: bool = True,
    **chosen: Any,
) -> PredictionReport:
    """Return what `model` would need and do on `target`: a card by name (rtx4090, h100, mi300x) or
    an architecture (cuda:90, hip:gfx942), of which times are not known, and memory only where
    `memory` says it, in bytes or as "24GiB".

    Nothing is run and no weight is read; with `random_weights`, a config.json or a name such as
    gemma-3-4b, there need be none, and `weights` of the options is their type (BF16, Q4_K_M).
    `compile=False` leaves out what takes seconds, compiling the kernels ahead of time. `chosen`
    are the fields of `LoadOptions` less those of a device that is here; with `tp` of them, as many
    such cards share the model beside. Raises MtmdError.
    """
    card = find_card(target, size_or_none("memory", memory))
    shares = _shares(chosen)
    subject = subject_of(target, model, random_weights, **chosen)
    device = subject.backends[0]
    assert isinstance(device, Target)
    report, needs = subject.warmup_report, Needs(subject, device, card)
    plans = list(_plans(subject))
    not_compiled = _why_not(compile)
    kernels = (
        () if not_compiled else (k for g, plan in plans for k in compiled_kernels(g, plan, device))
    )
    facts = facts_of(report)
    facts["device_name"] = "not here: predicted"
    links: tuple[LinkFacts, ...] = ()
    if shares:
        facts["ranks"], links = shared_out(subject, device, card, shares)
    return PredictionReport(
        **facts,
        card=card_facts(card),
        sequences=subject.runner.sequences,
        context=subject.runner.context,
        context_most=subject.checkpoint.text.context,
        usable_bytes=usable_bytes(card.memory_bytes),
        weight_bytes=needs.weight_bytes(),
        longest_context=needs.longest_context(),
        most_answers=needs.most_answers(),
        lengths=needs.lengths,
        pictures=needs.pictures,
        work=tuple(_work(g, plan, device, needs) for g, plan in plans),
        links=links,
        compiled=tuple(kernels),
        not_compiled=not_compiled,
    )


def _shares(chosen: dict[str, Any]) -> tuple[float, ...]:
    """Return the shares of the ranks that `tp` asks for, which is taken out of `chosen`; empty
    without.
    """
    names = ("tp", "tensor_split")
    requested = options(LoadOptions, {name: chosen.pop(name) for name in names if name in chosen})
    return requested.tensor_split or (1.0,) * requested.tp if requested.tp > 1 else ()


def subject_of(
    target: str, model: str | PathLike[str] | None, random_weights: str | None, **chosen: Any
) -> Model:
    """The model as it would be placed on the target, whose weights are not read. Raises MtmdError,
    OptionError for options of a device that is here.
    """
    chosen = given(chosen)
    if useless := [name for name in NO_USE if name in chosen]:
        hint = "give memory" if useless[0] == "memory_limit" else "leave it out"
        raise OptionError(
            f"{useless[0]}: has no meaning for the target {target!r:.60}, a GPU that you do not "
            f"have; {hint}"
        )
    card = find_card(target)
    if random_weights is not None and model is not None:
        raise OptionError(
            f"found both the model {str(model)!r:.60} and random_weights; expected one of them"
        )
    if _is_old(card.target) and chosen.get("dtype", "auto") == "auto":
        chosen = {**chosen, "dtype": "fp32"}
    settings = options(LoadOptions, chosen)
    checkpoint, name = _checkpoint(model, random_weights, settings)
    return Model(checkpoint, settings, [Target(card.target), Cpu(), Reference()], name=name)


def _checkpoint(
    model: str | PathLike[str] | None, shape: str | None, settings: LoadOptions
) -> tuple[Checkpoint, str | None]:
    if shape is None:
        return find_checkpoint(model, settings, answers=False)
    kind = type_of_random_weights(settings)
    checkpoint = random_checkpoint(shape, kind)
    return checkpoint, f"{checkpoint.folder}, random weights ({kind})"


def _is_old(target: str) -> bool:
    """Return whether it has no bf16, and a model loaded there would be in fp32."""
    kind, _, version = target.partition(":")
    return kind == "cuda" and int(version) < MIN_CAPABILITY


def _why_not(compile: bool) -> str | None:
    if not compile:
        return "not asked for"
    if not has_triton():
        return f"Triton, which compiles them, is not installed; {INSTALL}"
    return None


def _plans(model: Model) -> list[tuple[str, Plan]]:
    """Every graph at the sizes that a warm-up asks about."""
    encoder, runner = model.encoder, model.runner
    plans = []
    if encoder:
        for label, (batch, tile) in encoder.sizes().items():
            plans.append((f"encoder, {label}", encoder.plan(batch, tile.shape)))
    plans += [(f"decoder, {label}", runner.plan(batch)) for label, batch in runner.sizes().items()]
    return plans


def _work(graph: str, plan: Plan, device: Target, needs: Needs) -> GraphOps:
    with torch.no_grad():
        ops = shares(plan, device, needs.card)
    return GraphOps(graph, sum(op.launches for op in ops), ops)
