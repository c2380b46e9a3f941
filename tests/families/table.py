"""The family table: every row of tests/families, by module name."""

from __future__ import annotations

from importlib import import_module

from common import Row

MODULES = (
    "gemma3",
    "paligemma",
    "blip",
    "blip2",
    "instructblip",
    "moondream",
    "idefics2",
    "mllama",
    "trocr",
    "donut",
    "florence2",
    "ovis2",
    "gemma3n",
    "gemma4",
    "idefics3",
    "granite_docling",
    "llava",
    "llava_video",
    "granite4",
    "llava_onevision",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_next",
    "granite_hybrid",
    "nemotron_h",
    "phi",
    "opt",
    "qwen_omni",
    "hyperclovax",
    "phi3",
    "ernie4_5",
    "exaone4",
    "exaone4_5",
    "lfm2_vl",
    "lfm3_vl",
    "pixtral",
    "lighton_ocr",
    "internvl",
    "glm4v",
    "aya_vision",
    "cohere_compass",
    "llama4",
    "deepseek_ocr",
    "got_ocr2",
    "dots_ocr",
    "janus",
    "phi4_siglip",
    "phi4_multimodal",
    "minicpmv",
    "minicpmv4_6",
    "paddleocr_vl",
    "ernie4_5_vl",
    "video_llama3",
    "aria",
    "hunyuan_vl",
    "step3_vl",
    "nemotron_vl",
    "kimi_k25",
)
ROWS: dict[str, Row] = {name: import_module(name).ROW for name in MODULES}
CASES: list[tuple[str, str]] = [
    (name, variant) for name, row in ROWS.items() for variant in row.variants
]
# One of each family, and all with experts: of what runs alike whatever a layer is made of.
_FIRST = {row: (row, variant) for row, variant in reversed(CASES)}
CHOSEN = [case for case in CASES if case in _FIRST.values() or "experts" in case[1]]
