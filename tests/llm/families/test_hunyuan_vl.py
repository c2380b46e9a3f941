"""HunyuanOCR's decoder: sections of positions, the base that alpha stretches, and the golden
checkpoint from both formats.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hunyuan_vl import by_pairs
from torchvision_stand_in import torchvision_here

from mtmd import Finished, load
from mtmd.base.errors import ModelError
from mtmd.checkpoint.open import open_checkpoint
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.llm.engine.spans import Span, identities, lay_out
from mtmd.llm.families.hunyuan_vl import HunyuanText, read
from mtmd.model import Model
from mtmd.options.load import LoadOptions
from mtmd.prompt.conversation import user_message

GOLDEN = Path(__file__).parents[4] / "shared" / "golden_more" / "hunyuan_vl"
SMALL = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16}


def of(**rope: Any) -> HunyuanText:
    return read(Settings({**SMALL, "rope_parameters": rope}, "config.json"))


def test_sections_are_places_columns_rows_and_numbers() -> None:
    assert of(mrope_section=[2, 3, 1, 2]).rotary.axes == (0, 0, 2, 2, 2, 1, 3, 3)
    assert of(xdrope_section=[2, 3, 3]).rotary.axes == (2, 2, 1, 1, 1, 3, 3, 3)
    with pytest.raises(ModelError, match=r"mrope_section is \[2, 3\], expected 3 or 4 counts with"):
        of(mrope_section=[2, 3])


def test_alpha_is_another_base() -> None:
    published = of(type="xdrope", alpha=1000.0, mrope_section=[2, 2, 2, 2]).rotary
    base = 1e4 * 1000 ** (16 / 14)
    expected = 1.0 / (base ** (torch.arange(0, 16, 2).float() / 16))
    assert published.frequencies == tuple(expected.tolist())


def test_tokens_of_a_picture_keep_their_places() -> None:
    picture = Span((7,) * 6, torch.zeros(6, 4), grid=(2, 3), number=1, content=b"a")
    spans, after = lay_out([Span((1, 2)), picture, Span((3,))], 0)
    assert spans[1].positions is not None
    np.testing.assert_array_equal(
        spans[1].positions, [[2, 3, 4, 5, 6, 7], [0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2], [1] * 6]
    )
    assert after == 9
    assert list(identities([picture])) != list(identities([replace(picture, number=0)]))


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden_more"
)
def test_the_golden_checkpoint_from_both_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers has it with the authors' choice of axes; its expected.json is of
    transformers' own (docs/fidelity.md).
    """
    with torchvision_here():
        from transformers.models.hunyuan_vl import modeling_hunyuan_vl as modeling
        from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import (
            HunYuanVLImageProcessorPil,
        )
    from PIL import Image

    monkeypatch.setattr(modeling.HunYuanVLRotaryEmbedding, "recomposition_frequencies", by_pairs)
    expected = json.loads((GOLDEN / "expected.json").read_text())
    picture = GOLDEN / expected["images"][0]
    images = HunYuanVLImageProcessorPil.from_pretrained(GOLDEN / "hf")
    ids = torch.tensor([expected["prompt_token_ids"]])
    kinds = (ids == json.loads((GOLDEN / "hf/config.json").read_text())["image_token_id"]).int()
    theirs = modeling.HunYuanVLForConditionalGeneration.from_pretrained(
        GOLDEN / "hf", dtype=torch.float32
    )
    theirs.generation_config.eos_token_id = None
    answer = theirs.generate(
        input_ids=ids,
        mm_token_type_ids=kinds,
        max_new_tokens=32,
        do_sample=False,
        **images(Image.open(picture).convert("RGB"), return_tensors="pt"),
    )[0, ids.shape[1] :].tolist()
    folder = load(GOLDEN / "hf", dtype="fp32")
    checkpoint = open_checkpoint(GOLDEN / "text-BF16.gguf")
    assert checkpoint.vision is not None and folder.checkpoint.vision is not None
    named = {"image_token": folder.checkpoint.vision.marker}  # which the file does not say
    checkpoint = replace(
        checkpoint,
        vision=replace(checkpoint.vision, **named),
        tokenizer=folder.checkpoint.tokenizer,
    )
    for model in (folder, Model(checkpoint, LoadOptions(dtype="fp32"))):
        messages = [user_message([picture], expected["prompt"])]
        *_, last = model.stream(messages, max_tokens=32, ignore_eos=True)
        assert isinstance(last, Finished)
        assert list(last.answer.prompt_token_ids) == expected["prompt_token_ids"]
        assert list(last.answer.output_token_ids) == answer
