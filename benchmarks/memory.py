"""Predicted against measured peak memory of one encode: published towers with fewer layers.

    python benchmarks/memory.py

    Gemma 3's 896 px tower with flash attention on and off, each in a process of its own
    python benchmarks/memory.py --tower all     every tower, with flash attention
    python benchmarks/memory.py --tower NAME --form flash    one of them, as JSON

Measured is the rise of the process's peak resident size (VmHWM) over its size just before the run,
less the pages of files among it, which the system takes away and reads again; Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mtmd.bench.random_weights import RandomFile
from mtmd.clip.encoder import Encoder
from mtmd.clip.family import vision_family
from mtmd.kernels.backends import backends_for
from mtmd.kernels.checkpoint.canonical import CanonicalWeights
from mtmd.kernels.checkpoint.settings import Settings
from mtmd.kernels.plan.executor import Executor
from mtmd.kernels.resources.result_memory import ResultMemory

# glibc keeps freed blocks below a threshold that moves; pinned, what is freed is given back and the
# peak is the program's own.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


PAGE = (1120, 784)  # pixels of a page, where pictures come in their own size
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 1,
    "patch_size": 14,
}
BART = {
    "model_type": "bart",
    "d_model": 768,
    "decoder_attention_heads": 12,
    "decoder_ffn_dim": 3072,
    "decoder_layers": 6,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "encoder_layers": 6,
    "vocab_size": 51328,
}
SAM = {
    "width": 768,
    "layers": 3,
    "heads": 12,
    "downsample_channels": [512, 1024],
    "global_attn_indexes": [2],
}


def _widened(width: int, ratio: float) -> dict[str, Any]:
    """A block of MobileNet-V5 in timm's words, without depthwise convolutions."""
    return {
        "block_type": "uir",
        "out_chs": width,
        "dw_kernel_size_mid": 0,
        "exp_ratio": ratio,
        "stride": 1,
    }


def _narrowing(width: int, kernel: int) -> dict[str, Any]:
    """The first block of a stage."""
    first = {"dw_kernel_size_start": kernel, "dw_kernel_size_mid": 5, "stride": 2}
    return _widened(width, 6.0) | first


EDGE = {"block_type": "er", "out_chs": 128, "exp_kernel_size": 3, "exp_ratio": 4.0}
MOBILE = [
    [EDGE | {"stride": 2}, EDGE, EDGE],
    [_narrowing(256, 3), _widened(256, 4.0)],
    *(
        [
            _narrowing(width, 5),
            {"block_type": "mqa", "out_chs": width, "num_heads": heads, "key_dim": head}
            | {"value_dim": head, "kv_stride": down},
            _widened(width, 2.0),
        ]
        for width, heads, head, down in ((640, 12, 64, 2), (1280, 16, 96, 1))
    ),
]
CLIP = {"width": 1024, "layers": 2, "heads": 16, "image_size": 224, "patch_size": 14}


class Tower(NamedTuple):
    """A model's type, what config.json and the image processor's settings say, and the pixels of a
    tile where the settings do not.
    """

    kind: str
    config: dict[str, Any]
    image: dict[str, Any]
    size: tuple[int, int] | None = None


TOWERS = {
    "gemma-3": Tower(
        "gemma3",
        {
            "vision_config": SIGLIP | {"image_size": 896},
            "text_config": {"hidden_size": 2560},
            "mm_tokens_per_image": 256,
        },
        {"size": 896},
    ),
    "gemma-3n": Tower(
        "gemma3n",
        {
            "vision_config": {"model_args": {"block_args": MOBILE}},
            "text_config": {"hidden_size": 2048},
        },
        {"do_normalize": False},
    ),
    "florence-2": Tower(
        "florence2",
        {
            "image_token_id": 51289,
            "vision_config": {"projection_dim": 768, "depths": [1, 1, 1, 1]},
            "text_config": BART,
        },
        {"size": {"height": 768, "width": 768}, "do_center_crop": False, "resample": 3},
    ),
    "deepseek-ocr": Tower(
        "deepseek_vl_v2",
        {
            "vision_config": {
                "image_size": 1024,
                "width": {"sam_vit_b": SAM, "clip-l-14-224": CLIP},
            },
            "language_config": {"hidden_size": 1280},
            "projector_config": {"projector_type": "linear"},
        },
        {},
        (1024, 1024),
    ),
    "glm-ocr": Tower(
        "glm_ocr",
        {
            "vision_config": {
                "model_type": "glm_ocr_vision",
                "hidden_size": 1024,
                "num_heads": 16,
                "depth": 2,
                "intermediate_size": 4096,
                "out_hidden_size": 1536,
            },
            "text_config": {"hidden_size": 1536},
        },
        {},
        PAGE,
    ),
    "paddleocr-vl": Tower(
        "paddleocr_vl", {"vision_config": SIGLIP, "text_config": {"hidden_size": 1024}}, {}, PAGE
    ),
    "ernie-4.5-vl": Tower(
        "ernie4_5_vl_moe",
        {"vision_config": {"depth": 2}, "text_config": {"hidden_size": 2560}},
        {},
        PAGE,
    ),
    "video-llama-3": Tower(
        "video_llama_3", {"vision_config": SIGLIP, "text_config": {"hidden_size": 2048}}, {}, PAGE
    ),
    "step3-vl": Tower(
        "step_robotics",
        {"vision_config": {"layers": 2}, "text_config": {"hidden_size": 4096}},
        {},
        (728, 728),
    ),
    "nemotron-omni": Tower(
        "nemotron_h_omni",
        {
            "vision_config": {"num_hidden_layers": 2},
            "text_config": {"hidden_size": 2688},
            "projector_hidden_size": 20480,
        },
        {},
        (1024, 1024),
    ),
    "lfm3-vl": Tower(
        "lfm3_vl",
        {"vision_config": {"num_hidden_layers": 4}, "text_config": {"hidden_size": 2048}},
        {"patch_size": 16},
        (1024, 1024),
    ),
    "aria": Tower(
        "aria",
        {"vision_config": SIGLIP | {"image_size": 980}, "text_config": {"hidden_size": 2560}},
        {"max_image_size": 980},
    ),
}


def measure(name: str, form: str, dtype: torch.dtype) -> dict[str, float]:
    """Bytes, predicted and measured, of one encode beyond weights."""
    tower = TOWERS[name]
    config = Settings({"model_type": tower.kind} | tower.config, name)
    family = vision_family(tower.kind, config, Settings(tower.image, name))
    kind = "F32" if dtype == torch.float32 else "BF16"
    parameters = family.parameters()
    encoder = Encoder(
        family,
        CanonicalWeights(RandomFile(parameters, lambda *_: kind), parameters, name),
        backends_for("cpu"),
        dtype=dtype,
        flash_attn="on" if form == "flash" else "off",
    )
    shape = (3, *tower.size) if tower.size else family.resolution.tile_type().shape
    plan = encoder.plan(1, shape)
    executor = Executor(plan, encoder.residency)
    predicted = plan.compute_bytes["cpu"]
    # The first run loads and compiles the code that the measured one needs.
    executor.run(torch.empty(1, *shape, dtype=dtype).uniform_(-1, 1))
    ResultMemory()  # takes what is kept for the next run, and is gone with it
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("RssAnon")
    executor.run(torch.empty(1, *shape, dtype=dtype).uniform_(-1, 1))
    measured = _status("VmHWM") - _status("RssFile") - before
    return {"predicted": predicted, "measured": measured}


def run(name: str, form: str = "flash", dtype: str = "fp32") -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--tower", name, "--form", form, "--dtype", dtype]
    result = subprocess.run(
        command, env=os.environ | ENVIRONMENT, check=True, capture_output=True, text=True
    )
    sizes: dict[str, float] = json.loads(result.stdout)
    return sizes


def _status(key: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(key))
    return int(line.split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tower", choices=(*TOWERS, "all"), default="gemma-3")
    parser.add_argument("--form", choices=("flash", "explicit"))
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    if args.form and args.tower != "all":
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype]
        print(json.dumps(measure(args.tower, args.form, dtype)))
        return
    forms = (args.form or "flash",) if args.tower == "all" else ("flash", "explicit")
    for name in TOWERS if args.tower == "all" else (args.tower,):
        for form in forms:
            r = run(name, form, args.dtype)
            print(
                f"{name:<14} {form:<9} predicted {r['predicted'] / 2**20:8.1f} MiB  measured "
                f"{r['measured'] / 2**20:8.1f} MiB  ratio {r['predicted'] / r['measured']:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
