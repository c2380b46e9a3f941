"""Quantized checkpoints that were made elsewhere: prompt ids and greedy tokens of transformers in
fp32 on the dequantized weights have to come from here.

They lie beside the repository, in `../shared/golden_more`; where they do not, these tests are
skipped.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtmd import Finished, load
from mtmd.inspect.info import model_info
from mtmd.kernels.checkpoint.open_weights import QuantizedWeights
from mtmd.prompt.conversation import user_message

GOLDEN = Path(__file__).parents[4] / "shared" / "golden_more"
pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden_more"
)
FOLDERS = {
    "qwen3_vl_fp8": "FP8, blocks of 128 x 128",
    "qwen3_vl_fp8_ct": "FP8, a scale for each row",
    "qwen3_vl_awq": "AWQ int4, groups of 128",
    "qwen3_vl_gptq": "GPTQ int4, groups of 128",
    "qwen3_vl_int4_ct": "compressed-tensors int4, groups of 128",
    "qwen3_vl_nvfp4_ct": "NVFP4",
    "qwen3_vl_nvfp4_modelopt": "NVFP4",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_tokens_from_quantized_safetensors(name: str) -> None:
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    model = load(GOLDEN / name / "hf", dtype="fp32")
    file = model.checkpoint.text_weights.file
    assert isinstance(file, QuantizedWeights) and file.quantized == FOLDERS[name]
    pictures = [GOLDEN / name / picture for picture in expected["images"]]
    *_, last = model.stream(
        [user_message(pictures, expected["prompt"])],
        max_tokens=len(expected["greedy_token_ids"]),
        ignore_eos=True,
    )
    assert isinstance(last, Finished)
    (note,) = last.answer.receipt.model_notes
    assert note.startswith(f"weights: {FOLDERS[name]}, ")
    assert model.warmup_report.weights == note and note in model_info(model).notes
    assert list(last.answer.prompt_token_ids) == expected["prompt_token_ids"]
    assert list(last.answer.output_token_ids) == expected["greedy_token_ids"]
