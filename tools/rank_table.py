"""Every variant of every family on 2, 3 and 4 ranks against one process: 48 greedy tokens, logits,
tower; what a rank holds, and what could not be shared.

    python tools/rank_table.py [WORD IN ROW OR VARIANT]

Forms: `safetensors`, a random tiny checkpoint; `GGUF`, the same as llama.cpp's converter writes it,
where the tests have a writer for the family; `Q8_0` and `Q4_K`, the same model widened to some
blocks a rank, of random blocks under GGUF's names. A line says for each number of ranks what the
largest rank holds of the weights; the exit code is 1 where anything differs.

Products of few rows with quantized weights round what they read to 16 bits, by groups that share a
scale (kernels/cpu/native/layouts.py). A sum over ranks differs from that of one process in the last
bits of fp32; of the values next to it, a few fall to the other side of a rounding's edge, by a
whole step: the difference grows with the root of itself, layer by layer, until it is as large as
what rounding does to either of them. So for `Q8_0` and `Q4_K` two things are asked: by the ops'
references, which decode the weights and round nothing, ranks are as close to one process as for
other weights; and by the kernels, at most `ROUNDED` times as far from it as it is from that, which
has a bound of its own, `ROUNDING`: kernels that are wrong would let ranks be wrong, too. The line
says how far ranks may have been.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import cycle
from math import lcm
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / part) for part in ("support", "families")]

import test_gemma4_gguf  # noqa: E402
import test_gguf_files  # noqa: E402
from checkpoints import too_far  # noqa: E402
from gguf_files import decoder, read_json  # noqa: E402
from table import CASES, ROWS  # noqa: E402
from test_ranks import Subject, greedy, runner_of  # noqa: E402

from mtmd.bench.shapes import random_checkpoint  # noqa: E402
from mtmd.checkpoint.checkpoint import Checkpoint  # noqa: E402
from mtmd.checkpoint.open import open_checkpoint  # noqa: E402
from mtmd.kernels.backends.reference import Reference  # noqa: E402

TOKENS = 48
SIZES = (2, 3, 4)
CLOSE = 1e-9  # of logits and embeddings: |found - expected|^2 / |expected|^2
# Both are rounded alike, so they lie about equally far from what is not rounded; in opposite
# directions, that is twice the distance between them, four times its square.
ROUNDED = 4
ROUNDING = 1e-7  # of one process from what is not rounded
WIDE, BLOCK, VOCABULARY = 1024, 256, 640
FLASH = cycle(("on", "off"))


def widened(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with rows of several blocks of 256, heads as large as they were."""
    text, vision = config.get("text_config", config), config.get("vision_config", {})
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    rows = 4 * lcm(head, BLOCK) if "head_dim" in text else lcm(head, BLOCK)
    hidden = BLOCK if "head_dim" in text else rows
    wide = dict.fromkeys(
        ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), WIDE
    )
    wide |= {
        "hidden_size": hidden,
        "vocab_size": VOCABULARY,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_attention_heads": rows // head,
        "num_key_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    }
    if text.get("hidden_size_per_layer_input"):
        wide["hidden_size_per_layer_input"] = 32
    if "linear_num_key_heads" in text:
        each = text["linear_num_value_heads"] // text["linear_num_key_heads"]
        wide |= {"linear_num_key_heads": 8, "linear_num_value_heads": 8 * each}
    text.update({name: size for name, size in wide.items() if name in text})
    for name in ("out_hidden_size", *(["hidden_size"] * (config["model_type"] == "qwen2_vl"))):
        if name in vision:
            vision[name] = hidden
    return config


def image_settings(folder: Path) -> dict[str, Any]:
    """How pictures and videos are prepared, of however many files, as one."""
    files = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
    both, own, video = (
        read_json(folder, name) if (folder / name).exists() else {} for name in files
    )
    image = both.get("image_processor") or own
    video = both.get("video_processor") or video
    return image | ({"video_processor": video} if video else {})


def quantized(folder: Path, to: Path, kind: str) -> Checkpoint:
    to.mkdir()
    (to / "preprocessor_config.json").write_text(json.dumps(image_settings(folder)))
    (to / "config.json").write_text(json.dumps(widened(read_json(folder, "config.json"))))
    return random_checkpoint(str(to), kind)


def gguf_writer(row: str) -> Callable[[Path, Path], None] | None:
    """Writes text.gguf and its projector; None where the tests have no writer."""
    if row == "gemma4":

        def write(folder: Path, to: Path) -> None:
            test_gemma4_gguf.write_decoder(folder, to / "text.gguf")
            test_gemma4_gguf.write_projector(folder, to / "mmproj.gguf")

        return write
    if row not in test_gguf_files.PROJECTORS:
        return None

    def convert(folder: Path, to: Path) -> None:
        config, names = read_json(folder, "config.json"), test_gguf_files.ARCHITECTURES
        kind = config["text_config"]["model_type"]
        architecture = names.get(config["model_type"], names.get(kind, kind))
        decoder(folder, to / "text.gguf", architecture)
        test_gguf_files.PROJECTORS[row][0](folder, to / "mmproj.gguf")

    return convert


def forms(row: str, folder: Path, room: Path) -> Iterator[tuple[str, Checkpoint]]:
    yield "safetensors", open_checkpoint(folder)
    if (write := gguf_writer(row)) is not None:
        (room / "gguf").mkdir()
        write(folder, room / "gguf")
        yield "GGUF", open_checkpoint(room / "gguf" / "text.gguf")
    for kind in ("Q8_0", "Q4_K"):
        yield kind, quantized(folder, room / kind, kind)


def differences(
    subject: Subject, sees: bool, rounds: bool
) -> Iterator[tuple[int, float, str | None, set[str], float]]:
    """By number of ranks: the largest rank's share of the weights, what differs, what is whole, how
    far logits may be. `rounds`: products round what they read.
    """
    tokens, logits = subject.whole(TOKENS)
    exact, close, rounding, is_off = logits, CLOSE, 0.0, False
    if rounds:
        runner = runner_of(subject.model.checkpoint, subject.image_tokens, backends=[Reference()])
        exact = greedy(runner, subject.spans, 1)[1]
        rounding, is_off = too_far([logits], exact, ROUNDING)
        close = max(CLOSE, ROUNDED * min(rounding, ROUNDING))
    total = subject.model.runner.plan(subject.model.runner.sizes()["decode"]).weight_bytes["cpu"]
    for size in SIZES:
        flash, wrong = next(FLASH), None
        results = subject.on_ranks(size, TOKENS, flash_attn=flash)
        far, is_far = too_far([r[1] for r in results], logits, close)
        if any(r[0] != tokens for r in results):
            at = next(i for i in range(TOKENS) if any(r[0][i] != tokens[i] for r in results))
            wrong = f"token {at} of {TOKENS}"
        elif is_off:
            wrong = f"one process from what is not rounded by {rounding:.1g}"
        elif is_far:
            wrong = f"logits by {far:.1g}, expected at most {close:.1g}"
        elif rounds and (why := not_rounded(subject, size, exact)):
            wrong = why
        elif sees:
            try:
                subject.check_tower(size, flash)
            except AssertionError:
                wrong = "the tower's embeddings"
        runners = [r[2] for r in results]
        saved = {k.reason for r in runners for k in r.sharding.kept_whole if k.refused}
        maximum = max(r.residency.bytes["cpu"] for r in runners)
        yield size, maximum / total, wrong, saved, close


def not_rounded(subject: Subject, size: int, expected: torch.Tensor) -> str:
    """How far the logits of ranks are from those of one process, by the ops' references, where that
    is too far.
    """
    results = subject.on_ranks(size, 1, backends=lambda: [Reference()])
    far, is_far = too_far([r[1] for r in results], expected, CLOSE)
    return f"logits that are not rounded by {far:.1g}" if is_far else ""


def main(word: str = "") -> int:
    torch.set_num_threads(1)
    print(f"{'form':<12}{'2 ranks':>8}{'3':>6}{'4':>6}  row: variant; whole on every rank")
    count = failed = 0
    for row, variant in CASES:
        if word not in f"{row}: {variant}":
            continue
        with tempfile.TemporaryDirectory() as name:
            (folder := Path(name) / "oracle").mkdir()
            oracle = ROWS[row].variants[variant](folder)
            for form, checkpoint in forms(row, oracle.folder, Path(name)):
                sees, rounds = ROWS[row].vision, form in ("Q8_0", "Q4_K")
                result = list(differences(Subject(checkpoint, sees), sees, rounds))
                wrong = [f"{size} ranks: {w}" for size, _, w, *_ in result if w]
                saved = sorted({reason for *_, reasons, _ in result for reason in reasons})
                shares = "".join(f"{share:>6.0%}" for _, share, *_ in result)
                reported = f"{row}: {variant}" + "".join(f"; {k}" for k in saved)
                reported += f"; logits within {result[0][-1]:.1g}"
                reported += "".join(f"; DIFFERS, {w}" for w in wrong)
                print(f"{form:<12}  {shares}  {reported}", flush=True)
                count, failed = count + len(SIZES), failed + len(wrong)
    print(f"{count - failed} of {count} give the {TOKENS} tokens of one process")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
