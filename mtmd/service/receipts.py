"""The receipt of an answer, from what each part of its way left behind."""

from __future__ import annotations

import json

from mtmd.base.options import defaults_of
from mtmd.base.text import plural
from mtmd.kernels.dtype import name_of
from mtmd.kernels.gpu.ahead.compilations import Compilations, compilations
from mtmd.kernels.report.machine_facts import thread_warnings
from mtmd.kernels.resources.compiled import kernels_compiled
from mtmd.llm.sampling.options import DRAWING, NOTHING_RECOMMENDED, AppliedSampling, Sampling
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.ranks_report import ranks_warnings
from mtmd.loaded.report import (
    attention_report,
    layout_text,
    preprocessed_where,
    recording_warnings,
    refusal_warnings,
)
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.bridge import Prepared
from mtmd.receipt import Receipt, SamplingReceipt
from mtmd.service.request import Request


def make_receipt(loaded: LoadedModel, request: Request, finish: str, speculation: str) -> Receipt:
    """Make the receipt of a request that ended so, wherever it was. `speculation` as the engine's
    says it.
    """
    prompt = request.prompt
    images = tuple(picture.receipt for picture in prompt.images)
    # None for a request that ended before the decoder had it
    sequence = request.sequence
    compiled, before = kernels_compiled(), request.kernels_before
    return Receipt(
        model=loaded.name,
        images=images,
        image_tokens=sum(one.plan.tokens for one in prompt.pictures if isinstance(one, Prepared)),
        prompt_tokens=len(request.prompt.tokens),
        reused_tokens=sequence.reused if sequence else 0,
        output_tokens=len(request.tokens),
        proposed_tokens=sequence.proposed if sequence else 0,
        accepted_tokens=sequence.accepted if sequence else 0,
        finish=finish,
        preprocess_ms=request.preprocess_ms,
        encode_ms=request.encode_ms,
        queued_ms=sequence.queued_ms if sequence else 0.0,
        prefill_ms=sequence.prefill_ms if sequence else 0.0,
        decode_ms=sequence.decode_ms if sequence else 0.0,
        device=loaded.backends[0].name,
        dtype=name_of(loaded.dtype),
        attention=attention_report(loaded),
        speculation=speculation,
        seed=request.sampler.seed if request.settings.temperature else None,
        warnings=(
            *model_warnings(loaded),
            *request.prompt.notes,
            *request.warnings,
            *_without_effect(request.settings),
            *_repeated(request, finish),
            *_cut(request, finish),
            *_compiled_meanwhile(request.compiled_before),
        ),
        threads=loaded.runner.threads,
        ranks=loaded.options.tp,
        layout=layout_text(loaded),
        videos=prompt.videos,
        audio=tuple(one.receipt for one in prompt.audio),
        audio_tokens=sum(one.plan.tokens for one in prompt.audio),
        preprocessed=preprocessed_where(
            loaded.encoder,
            [p.plan for p in prompt.pictures if isinstance(p, Prepared) and not p.receipt.cached],
        ),
        kernels_compiled=compiled.kernels - before.kernels,
        compile_ms=compiled.ms - before.ms,
        sampling=_sampling(request.settings),
        sampling_unused=_sampling_unused(request.settings),
        model_notes=loaded.notes,
        kv_type=loaded.runner.kv.name,
        activations=loaded.activations,
        kv_bytes=loaded.kv.token_bytes * (len(request.prompt.tokens) + len(request.tokens)),
        repeated_tokens=request.repetition.repeated,
        adapters=_adapters(loaded, request),
        thinking_tokens=request.thought.tokens if request.thought else 0,
    )


def _adapters(loaded: LoadedModel, request: Request) -> dict[str, float]:
    chosen = loaded.checkpoint.chosen_adapters
    scales = zip(chosen, request.adapters or (0.0,) * len(chosen), strict=True)
    always = {one.name: one.scale for one in loaded.checkpoint.applied_adapters}
    return always | {one.name: scale for one, scale in scales if scale}


def model_warnings(loaded: LoadedModel) -> tuple[str, ...]:
    """Return the warnings that every receipt of the model has."""
    return (
        *refusal_warnings(loaded.placements),
        *recording_warnings(loaded.backends),
        *ranks_warnings(loaded),
        *thread_warnings(loaded.backends[0], loaded.cores),
        *((f"keys and values: {loaded.kv.warning}",) if loaded.kv.warning else ()),
    )


def _sampling(settings: AnswerOptions) -> dict[str, SamplingReceipt]:
    """Return what chose the tokens, by the names of the options: the temperature, and the others
    that are not off.
    """
    applied = _applied(settings)
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    repeated = ("no_repeat_ngram", "no_repeat_window")
    names = (*(DRAWING if settings.temperature else ("temperature",)), *penalties, *repeated)
    usual, own = defaults_of(Sampling), applied.settings.defaults(applied.way)
    result = {}
    for name in names:
        value = getattr(settings, name)
        is_usual = value == usual[name]
        if name in applied.names:
            result[name] = SamplingReceipt(value, applied.settings.source)
        elif name in applied.preset:
            result[name] = SamplingReceipt(value, "preset")
        elif not is_usual or name in own:
            result[name] = SamplingReceipt(value, "request")
        elif name == "temperature":
            result[name] = SamplingReceipt(value, "default")
    return result


def _sampling_unused(settings: AnswerOptions) -> tuple[str, ...]:
    applied = _applied(settings)
    return applied.settings.unused if applied.way != "off" else ()


def _applied(settings: AnswerOptions) -> AppliedSampling:
    """Nothing of a model's, where its settings were not looked up."""
    result = settings.sampling
    return (
        result
        if isinstance(result, AppliedSampling)
        else AppliedSampling("off", NOTHING_RECOMMENDED)
    )


def _without_effect(settings: AnswerOptions) -> tuple[str, ...]:
    own = _applied(settings).names  # which nobody gave for this answer
    names = [name for name in settings.without_effect if name not in own]
    if not names:
        return ()
    return (
        f"{', '.join(names)}: no effect at temperature 0, which takes the most probable token; "
        "give a temperature above 0",
    )


def _repeated(request: Request, finish: str) -> tuple[str, ...]:
    """Return the repeated of an answer that ends in a loop, or a thought that did."""
    result = request.repetition
    closed = (
        ("the thought said the same again and again, so it was closed (stop_repeating)",)
        if request.closed_loop
        else ()
    )
    if not result.result or finish == "cancelled":
        return closed
    stated = (
        f"the last {result.repeated:,} tokens of the answer are the same {result.period} again and "
        "again"
    )
    if request.settings.stop_repeating:
        return (*closed, f"{stated}, so it was stopped (stop_repeating)")
    return (f"{stated}; a repetition_penalty such as 1.1 helps, and stop_repeating ends it",)


_IN_THOUGHT = {
    "length": "the answer was cut within its thought; give more max_tokens, or a think_budget",
    "stop": "the model ended its answer within the thought; a think_budget leaves room for more",
}
_AFTER_THOUGHT = {
    "length": "the answer was cut before its first word, after its thought; give more max_tokens, "
    "or a think_budget",
    "stop": "the model ended its answer after the thought, before its first word",
}


def _cut(request: Request, finish: str) -> tuple[str, ...]:
    """Return the note of an answer that was to be JSON and is the beginning of some, or that is a
    thought alone.
    """
    if finish in ("length", "stop") and _has_no_answer(request):
        thought = request.thought
        if thought is not None and thought.sleeps and request.tokens:
            return (_IN_THOUGHT[finish],)
        if request.thoughts:
            return (_AFTER_THOUGHT[finish],)
    if request.settings.json_schema is None or finish not in ("length", "stop"):
        return ()
    if _is_json("".join(request.texts)):
        return ()
    if request.settings.stop_repeating and request.repetition.result:
        return ()  # the warning about the repetition says it
    if finish == "stop":
        return ("a stop text cut the answer before its JSON ended",)
    return ("the answer was cut before its JSON ended; give more max_tokens",)


def _has_no_answer(request: Request) -> bool:
    called = request.parser is not None and request.parser.calls
    return not (called or request.checker.result or "".join(request.texts).strip())


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _compiled_meanwhile(before: Compilations) -> tuple[str, ...]:
    """Return what was compiled for a GPU while the request was under way, by whichever request."""
    now = compilations()
    count = now.late - before.late
    if not count:
        return ()
    return (
        f"{plural(count, 'GPU program')} had to be compiled meanwhile "
        f"({(now.late_ms - before.late_ms) / 1e3:.1f} s); 'mtmd warmup' compiles what it foresees "
        "ahead, and Triton's cache keeps them",
    )
