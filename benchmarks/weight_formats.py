"""Checkpoints of about a gigabyte in each quantized format, in Qwen2.5-1.5B's shape with half of
its layers: memory of the process against the file, time to load, prompt and tokens, beside the same
model in BF16.

    python benchmarks/weight_formats.py --folder /tmp/files
    python benchmarks/weight_formats.py --folder /tmp/files --formats fp8,awq --rounds 3

Weights are random; each form is written, measured in a process of its own with one thread, and
removed. Times are CPU seconds, loading from pages that are in memory; memory is what
the process takes beyond its modules. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from mtmd.llm.engine.make_batch import make_batch
from mtmd.llm.engine.spans import Span
from mtmd.loading import load

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))
WIDTH, INNER, HEADS, GROUPS, VOCABULARY, LAYERS = 1536, 8960, 12, 2, 151_936, 14
SHAPES = {
    "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH // HEADS * GROUPS, WIDTH),
    "self_attn.v_proj": (WIDTH // HEADS * GROUPS, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
USUAL = (
    "fp8",
    "fp8-row",
    "awq",
    "gptq",
    "int4",
    "int8",
    "nvfp4",
    "mxfp4",
    "nf4",
    "bnb-int8",
    "mlx",
)
PROMPT, STEPS = 256, 16


def write(folder: Path, name: str) -> Path:
    """The checkpoint with its layers in a format, or in BF16."""
    from quantized_files import FORMATS
    from small_tokenizers import byte_level

    folder.mkdir(parents=True)
    made: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(1)
    for shape in dict.fromkeys(SHAPES.values()):
        weight = torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5)
        plain = name == "bf16"
        made[shape] = {"weight": weight.bfloat16()} if plain else FORMATS[name].quantize(weight)[0]
    table = torch.randn(VOCABULARY, WIDTH, generator=generator).mul_(0.02).bfloat16()
    tensors = {"model.embed_tokens.weight": table, "model.norm.weight": torch.ones(WIDTH)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = torch.ones(WIDTH)
        for linear, shape in SHAPES.items():
            if linear[:11] in ("self_attn.q", "self_attn.k", "self_attn.v"):
                tensors[f"{at}.{linear}.bias"] = torch.zeros(shape[0])
            tensors |= {f"{at}.{linear}.{p}": t.clone() for p, t in made[shape].items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    extra = {} if name == "bf16" else {"quantization_config": FORMATS[name].settings}
    (folder / "config.json").write_text(json.dumps(CONFIG | extra))
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def measure(path: str, rounds: int) -> dict[str, Any]:
    """In this process: what it takes to load, and what the process takes then."""
    files = [Path(path)] if Path(path).is_file() else list(Path(path).glob("*.safetensors"))
    for file in files:
        file.read_bytes()  # into the system's memory of files
    load_ = {"device": "cpu", "dtype": "bf16", "context": 512, "threads": 1}
    Path("/proc/self/clear_refs").write_text("5")
    before, begin = _status("VmRSS"), time.process_time()
    with load(path, **load_) as model:
        runner = model.runner
        prompts, steps, loaded = [], [], []

        def work() -> None:
            for _ in range(rounds + 1):
                cache = runner.new_cache()
                sequence = runner.begin(cache, 0)
                for count in (1, PROMPT, *[1] * STEPS):
                    batch = make_batch([(sequence, [Span((65,) * count)])], cache, rows=[1])
                    start = time.thread_time()
                    runner.forward(batch)
                    (prompts if count > 1 else steps).append(time.thread_time() - start)
                    if not loaded:
                        loaded.extend(
                            (time.process_time() - begin, _status("VmHWM"), _status("VmRSS"))
                        )
                    sequence.done = sequence.total = sequence.position = sequence.done + count

        model.exclusively(work)
        report = model.warmup_report
    return {
        "file_mb": sum(file.stat().st_size for file in files) / 1e6,
        "load_s": loaded[0],
        "peak_mb": (loaded[1] - before) / 1e6,
        "mb": (loaded[2] - before) / 1e6,
        "prompt_ms": 1000 * min(prompts),
        "step_ms": 1000 * min(steps),
        "dequantized": bool(report.dequantized),
    }


def _status(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) << 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--formats", default=",".join(USUAL))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.rounds)))
        return
    from quantized_files import FORMATS

    print(
        "| format | file, MB | most memory / file | memory / file | first token, s | GB/s | "
        "prompt, ms | step, ms | tokens/s |",
        flush=True,
    )

    args.folder.mkdir(parents=True, exist_ok=True)
    plain = write(args.folder / "bf16", "bf16")
    row("BF16", plain, args.rounds)
    for name in args.formats.split(","):
        path = write(args.folder / name, name)
        row(FORMATS[name].label, path, args.rounds)
        shutil.rmtree(path)
    shutil.rmtree(plain)


def row(label: str, path: Path, rounds: int) -> None:
    command = [sys.executable, "-W", "ignore", __file__, "--measure", str(path)]
    result = subprocess.run(
        [*command, "--rounds", str(rounds)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    m = json.loads(result.stdout.splitlines()[-1])
    print(
        f"| {label} | {m['file_mb']:,.0f} | {m['peak_mb'] / m['file_mb']:.2f} | "
        f"{m['mb'] / m['file_mb']:.2f} | {m['load_s']:.1f} | "
        f"{m['file_mb'] / 1000 / m['load_s']:.2f} | {m['prompt_ms']:.0f} | {m['step_ms']:.0f} | "
        f"{1000 / m['step_ms']:.1f} |{' dequantized' * m['dequantized']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
