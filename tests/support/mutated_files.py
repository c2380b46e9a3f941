"""Sound checkpoints to be damaged, and the processes in which damaged ones are opened."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from table import ROWS

from mtmd.checkpoint.open import open_checkpoint

SUPPORT = Path(__file__).parent
GOOD = (
    "loaded",
    "MtmdError",
    "ImageError",
    "ModelError",
    "OptionError",
    "PromptError",
    "ContextError",
    "PlacementError",
)
PEAK_BYTES = 1 << 30  # of the whole process, Python and torch included
FAMILIES = {
    "gemma3": 0,
    "idefics3": 0,
    "qwen2_vl": 2,
    "qwen3_vl": 2,
    "llava": 2,
    "qwen3_next": 0,
    "lfm2_vl": 0,
}  # row, which variant
GOLDEN = SUPPORT.parents[2] / "shared" / "golden"
GOLDEN_PAIRS = (
    "smolvlm/text-BF16",
    "qwen2_5_vl/text-BF16",
    "qwen3_vl/text-Q4_0",
    "lfm2_vl/text-Q8_0",
    "qwen3_next/text-BF16",
)


def gguf_pair(source: Path, folder: Path) -> None:
    """A Gemma 3 checkpoint folder as text.gguf and mmproj.gguf, by the gguf package's writer."""
    from gguf import GGUFWriter

    checkpoint, tokenizer = (
        open_checkpoint(source),
        json.loads((source / "tokenizer.json").read_text()),
    )
    c = json.loads((source / "config.json").read_text())
    text, vision = c["text_config"], c["vision_config"]
    folder.mkdir()
    writer = GGUFWriter(folder / "text.gguf", "gemma3")
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_sliding_window(text["sliding_window"])
    writer.add_layer_norm_rms_eps(1e-6)
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    special = {t["content"] for t in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in special else 1 for t in tokens])
    writer.add_token_merges([" ".join(m) for m in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(tokens.index("<bos>"))
    writer.add_eos_token_id(tokens.index("<end_of_turn>"))
    writer.add_chat_template((source / "chat_template.jinja").read_text())
    _finish(writer, checkpoint.text.parameters(), checkpoint.text_weights)
    writer = GGUFWriter(folder / "mmproj.gguf", "clip")
    writer.add_clip_projector_type("gemma3")
    writer.add_vision_projection_dim(text["hidden_size"])
    for add, key in (
        (writer.add_vision_image_size, "image_size"),
        (writer.add_vision_patch_size, "patch_size"),
        (writer.add_vision_embedding_length, "hidden_size"),
        (writer.add_vision_feed_forward_length, "intermediate_size"),
        (writer.add_vision_block_count, "num_hidden_layers"),
        (writer.add_vision_head_count, "num_attention_heads"),
    ):
        add(vision[key])
    writer.add_vision_image_mean([0.5] * 3)
    writer.add_vision_image_std([0.5] * 3)
    writer.add_vision_use_gelu(True)
    writer.add_vision_projector_scale_factor(2)
    assert checkpoint.vision
    _finish(writer, checkpoint.vision.parameters(), checkpoint.vision_weights)


def _finish(writer: Any, parameters: Any, weights: Any) -> None:
    import torch

    for name in parameters:
        tensor = weights.read(name, torch.float32)
        writer.add_tensor(
            name,
            (tensor.t().contiguous() if name == "mm.input_projection.weight" else tensor).numpy(),
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_seeds(folder: Path) -> Path:
    """A folder for each sound checkpoint; those of the golden ones that are there."""
    for row, variant in FAMILIES.items():
        list(ROWS[row].variants.values())[variant](folder / row)
    gguf_pair(folder / "gemma3", folder / "gguf")
    for pair in GOLDEN_PAIRS if GOLDEN.is_dir() else ():
        text = GOLDEN / f"{pair}.gguf"
        (folder / f"golden-{text.parent.name}").mkdir()
        for file in (text, text.with_name("mmproj-BF16.gguf")):
            if file.exists():
                (folder / f"golden-{text.parent.name}" / file.name).symlink_to(file)
    return folder


class Worker:
    """A process that runs cases; after one that ended it, another goes on."""

    def __init__(self, seeds: Path, scratch: Path):
        self.seeds, self.scratch, self.started = seeds, scratch, 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> subprocess.Popen[str]:
        self.started += 1
        self.errors = self.scratch / f"{self.started}.txt"
        folder = self.scratch / str(self.started)
        command = [sys.executable, SUPPORT / "mutated_worker.py", self.seeds, folder]
        with self.errors.open("wb") as errors:
            return subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={"OMP_NUM_THREADS": "1", "PATH": ""},
            )

    def run(self, kind: str, first: int, count: int) -> list[dict[str, Any]]:
        """What became of each case."""
        results: list[dict[str, Any]] = []
        while len(results) < count:
            if self.process is None:
                self.process = self.start()
            assert self.process.stdin and self.process.stdout
            self.process.stdin.write(f"{kind} {first + len(results)} {first + count}\n")
            self.process.stdin.flush()
            lines = itertools.islice(self.process.stdout, count - len(results))
            results += map(json.loads, lines)
            if len(results) < count:
                code = self.close()
                results.append(
                    {
                        "seed": first + len(results),
                        "what": f"a {kind} file that ended the process",
                        "message": self.errors.read_text(errors="replace")[-3000:],
                        "cpu": 0.0,
                        "peak": 0,
                        "outcome": f"exit code {code}",
                    }
                )
        return results

    def close(self) -> int | None:
        """Ends the process; its exit code."""
        process, self.process = self.process, None
        if process is None:
            return None
        with process, contextlib.suppress(BrokenPipeError):
            assert process.stdin
            process.stdin.close()
        return process.returncode


def failures(result: list[dict[str, Any]]) -> list[str]:
    wrong = [f for f in result if f["outcome"] not in GOOD or f["peak"] > PEAK_BYTES]
    return [
        f"seed {f['seed']}: {f['what']}\n    {f['outcome']}, {f['peak'] >> 20} MiB: {f['message']}"
        for f in wrong
    ]
