"""Predicted against measured peak memory of one encode, flash attention on and off; Gemma 3's 896
px tower with fewer layers.

    python benchmarks/memory.py

    both forms, each in a process of its own, and the ratios
    python benchmarks/memory.py --form flash    one form, as JSON

Measured is the rise of the process's peak resident size (VmHWM) over its size just before the run;
Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

from mtmd.clip.blocks import VitParams
from mtmd.clip.encoder import Encoder
from mtmd.clip.families.gemma3 import Gemma3Vision
from mtmd.clip.image.pixels import Normalize
from mtmd.clip.resolution.fixed_square import FixedSquare
from mtmd.kernels.backends import backends_for
from mtmd.kernels.graph import Type
from mtmd.kernels.plan.executor import Executor
from mtmd.kernels.plan.scheduler import Plan

# glibc keeps freed blocks below a threshold that moves; pinned, what is freed is given back and the
# peak is the program's own.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MALLOC_ARENA_MAX": "1",
}


class RandomWeights:
    """A `WeightSource` of noise in the shapes a family asks for."""

    def __init__(self, family: Gemma3Vision):
        self.shapes = {name: p.shape for name, p in family.parameters().items()}

    def type_of(self, name: str, dtype: torch.dtype) -> Type:
        return Type.contiguous(self.shapes[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        shape = self.shapes[name]
        return torch.randn(shape).mul_(shape[-1] ** -0.5 if len(shape) > 1 else 1).to(dtype)

    def quant(self, name: str) -> str | None:  # noqa: ARG002
        return None

    def order(self, name: str) -> str | None:  # noqa: ARG002
        return None


def tower(layers: int, image_size: int = 896) -> Gemma3Vision:
    """The published Gemma 3 4B tower: 4,096 patches, 16 heads of 72."""
    vit = VitParams(layers, 1152, 4304, 16, 1e-6, "tanh")
    square = FixedSquare(
        side=image_size,
        tokens=(image_size // 56) ** 2,
        normalize=Normalize((0.5,) * 3, (0.5,) * 3, 1 / 255),
        resample="bilinear",
        edge=image_size,
    )
    return Gemma3Vision(vit=vit, patch=14, text_width=2560, resolution=square)


def measure(form: str, layers: int, dtype: torch.dtype) -> dict[str, float]:
    """Bytes, predicted and measured, of one encode beyond weights."""
    # A smaller run first, which loads and compiles the code that the measured one needs.
    prepare(form, tower(1, 448), dtype)[1].run(torch.zeros(1, 3, 448, 448, dtype=dtype))
    family = tower(layers)
    plan, executor = prepare(form, family, dtype)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    executor.run(torch.empty(1, *family.resolution.tile_type().shape, dtype=dtype).uniform_(-1, 1))
    measured = _status("VmHWM") - before  # predicting loads torch's compiler, so it comes after
    return {"predicted": plan.compute_bytes["cpu"], "measured": measured}


def prepare(form: str, family: Gemma3Vision, dtype: torch.dtype) -> tuple[Plan, Executor]:
    """Planned, with its weights in memory."""
    encoder = Encoder(
        family,
        RandomWeights(family),
        backends_for("cpu"),
        dtype=dtype,
        flash_attn="on" if form == "flash" else "off",
    )
    plan = encoder.plan(1, family.resolution.tile_type().shape)
    return plan, Executor(plan, encoder.residency)


def run(form: str, layers: int = 2, dtype: str = "fp32") -> dict[str, float]:
    """`measure` in a fresh process."""
    command = [sys.executable, __file__, "--form", form, "--layers", str(layers), "--dtype", dtype]
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
    parser.add_argument("--form", choices=("flash", "explicit"))
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    args = parser.parse_args()
    if args.form:
        print(
            json.dumps(
                measure(
                    args.form,
                    args.layers,
                    {"fp32": torch.float32, "bf16": torch.bfloat16}[args.dtype],
                )
            )
        )
        return
    results = {form: run(form, args.layers, args.dtype) for form in ("flash", "explicit")}
    for form, r in results.items():
        print(
            f"{form:<9} predicted {r['predicted'] / 2**20:8.1f} MiB  measured "
            f"{r['measured'] / 2**20:8.1f} MiB  "
            f"ratio {r['predicted'] / r['measured']:.3f}"
        )
    print(
        "explicit / flash: predicted "
        f"{results['explicit']['predicted'] / results['flash']['predicted']:.1f}, "
        f"measured {results['explicit']['measured'] / results['flash']['measured']:.1f}"
    )


if __name__ == "__main__":
    main()
