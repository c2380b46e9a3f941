"""The receipt of an answer, from what each part of its way left behind."""

from __future__ import annotations

from collections.abc import Sequence

from mtmd.kernels.dtype import name_of
from mtmd.llm.engine.engine import Generation
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import attention_kernels, refusal_warnings
from mtmd.receipt import ImageReceipt, Receipt


def make_receipt(
    loaded: LoadedModel,
    images: Sequence[ImageReceipt],
    generation: Generation | None,
    *,
    prompt_tokens: int,
    output_tokens: int,
    finish: str,
    preprocess_ms: float,
    encode_ms: float,
    seed: int | None,
) -> Receipt:
    """`generation` as far as it went, None for a request that ended before the decoder had it."""
    took = generation
    return Receipt(
        model=loaded.name,
        images=tuple(images),
        image_tokens=sum(i.tokens for i in images),
        prompt_tokens=prompt_tokens,
        reused_tokens=took.reused if took else 0,
        output_tokens=output_tokens,
        finish=finish,
        preprocess_ms=preprocess_ms,
        encode_ms=encode_ms,
        queued_ms=took.queued_ms if took else 0.0,
        prefill_ms=took.prefill_ms if took else 0.0,
        decode_ms=took.decode_ms if took else 0.0,
        device=loaded.backends[0].name,
        dtype=name_of(loaded.dtype),
        attention=attention_kernels(loaded),
        seed=seed,
        warnings=refusal_warnings(loaded),
    )
