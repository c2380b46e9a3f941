"""How exactly this project and its peers compute one GGUF file, each as it comes: the divergence
(KL) of the next token's probabilities from fp32 with the same weights, dequantized, in nats.

    python benchmarks/peers_quality.py model-Q4_0.gguf --llama-dir ~/llama.cpp/build/bin \\
        --openvino ~/openvino/bin/python

The text is that of `mtmd bench --quality`, in stretches of --context tokens; "prompt" reads a
stretch at once, "answer" token by token. The reference of this project and of OpenVINO GenAI is
transformers in fp32; that of llama.cpp is llama.cpp with the weights and the cache as fp32, by
llama-perplexity. The mean is over the later half of each stretch, for all programs. OpenVINO runs
the model that OpenVINO GenAI makes of the file, with its own settings for a CPU, which are printed.
A program that cannot read the file is reported.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Rows = Callable[[list[int]], Any]  # ids of a stretch -> fp32 logits [tokens, vocabulary]
SETTINGS = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
MEAN = re.compile(r"Mean\s+KLD:\s+(-?[\d.]+)")


def stretches(ids: list[int], context: int) -> Iterator[list[int]]:
    for first in range(0, len(ids) - context + 1, context):
        yield ids[first : first + context]


def log_softmax(logits: Any) -> Any:
    import numpy as np

    values = np.asarray(logits, dtype=np.float64)
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def divergence(read: Rows, reference: list[Any], ids: list[int], context: int) -> float:
    """The mean over the later half of each stretch."""
    import numpy as np

    each = []
    for stretch, expected in zip(stretches(ids, context), reference, strict=True):
        p, q = (log_softmax(rows[context // 2 : -1]) for rows in (expected, read(stretch)))
        each.append((np.exp(p) * (p - q)).sum(-1))
    return float(np.concatenate(each).mean())


def in_transformers(path: Path, threads: int) -> Rows:
    """fp32, with the weights dequantized."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()

    def read(ids: list[int]) -> Any:
        with torch.inference_mode():
            return model(torch.tensor([ids])).logits[0].numpy()

    return read


def ours(path: Path, threads: int, context: int) -> tuple[list[int], Rows, Rows, str]:
    """The text's ids, how it reads them as a prompt and one by one, and what it computes in."""
    from mtmd import load
    from mtmd.bench.quality import TEXT, log_probabilities

    model = load(str(path), threads=threads, context=context + 64)
    ids = list(model.checkpoint.tokenizer.encode(TEXT.read_text(encoding="utf-8")))

    def by(stretch: int) -> Rows:
        def read(ids: list[int]) -> Any:
            rows = lambda: log_probabilities(model.runner, tuple(ids), stretch)  # noqa: E731
            return model.exclusively(rows).numpy()

        return read

    return ids, by(context), by(1), str(model.dtype).removeprefix("torch.")


def openvino_rows(folder: Path, threads: int) -> None:
    """Runs in OpenVINO's Python: reads `ids.json`, writes its logits as `prompt` and `answer`."""
    import numpy as np
    import openvino
    import openvino_genai

    path = next(folder.glob("*.gguf"))
    # It saves its own model in the file's folder; GenAI gives no logits.
    openvino_genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
    core = openvino.Core()
    model = core.compile_model(
        core.read_model(folder / "openvino_model.xml"), "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    print(json.dumps({name: str(model.get_property(name)) for name in SETTINGS}))

    def rows(ids: list[int], stretch: int) -> Any:
        request = model.create_infer_request()
        result = []
        for first in range(0, len(ids), stretch):
            past = min(first + stretch, len(ids))
            feeds = {
                "input_ids": np.array([ids[first:past]], np.int64),
                "attention_mask": np.ones((1, past), np.int64),
                "position_ids": np.arange(first, past, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
            result.append(np.array(request.infer(feeds)["logits"][0], np.float32))
        return np.concatenate(result)

    for name, stretch in (("prompt", 10**9), ("answer", 1)):
        for number, ids in enumerate(json.loads((folder / "ids.json").read_text())):
            np.save(folder / f"{name}-{number}.npy", rows(ids, stretch))


def openvino(
    python: str, path: Path, ids: list[int], context: int, threads: int
) -> tuple[Rows, Rows, str]:
    """How it reads a prompt, and a token at a time, and its settings."""
    import numpy as np

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / path.name).symlink_to(path.resolve())
        cut = list(stretches(ids, context))
        (folder / "ids.json").write_text(json.dumps(cut))
        command = [python, __file__, str(folder), "--threads", str(threads), "--openvino-worker"]
        settings = run(command).splitlines()[-1]
        stored = {
            name: {tuple(one): np.load(folder / f"{name}-{n}.npy") for n, one in enumerate(cut)}
            for name in ("prompt", "answer")
        }
    prompt, answer = (lambda one, name=name: stored[name][tuple(one)] for name in stored)
    return prompt, answer, settings


def llama_cpp(folder: Path, path: Path, context: int, threads: int, more: list[str]) -> float:
    """The mean divergence that llama-perplexity reports of the file from fp32."""
    from mtmd.bench.quality import TEXT

    with tempfile.TemporaryDirectory() as temporary:
        exact, base = Path(temporary) / "F32.gguf", Path(temporary) / "base.kld"
        command = [str(folder / "llama-perplexity"), "-f", str(TEXT), "-c", str(context)]
        command += ["-t", str(threads), "--kl-divergence-base", str(base), *more]
        run([sys.executable, "-m", "mtmd.cli", "convert", str(path), str(exact), "--to", "F32"])
        fp32 = ["-ctk", "f32", "-ctv", "f32", "-fa", "off"]
        run([*command, "-m", str(exact), *fp32])
        text = run([*command, "-m", str(path), "--kl-divergence"])
    if not (reported := MEAN.search(text)):
        raise RuntimeError(f"llama-perplexity reported no divergence: {text[-200:]!r}")
    return float(reported[1])


def run(command: list[str]) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise RuntimeError(f"{Path(command[0]).name} failed: {' '.join(lines[-2:])[-200:]}")
    return done.stdout + ("" if done.stdout.strip() else done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--context", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--llama-dir", type=Path, help="where llama-perplexity is")
    parser.add_argument("--llama-args", default="", help="further arguments for it")
    parser.add_argument("--openvino", metavar="PYTHON", help="the Python that has openvino-genai")
    parser.add_argument("--openvino-worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.openvino_worker:
        openvino_rows(args.model, args.threads)
        return
    ids, prompt, answer, dtype = ours(args.model, args.threads, args.context)
    exact = in_transformers(args.model, args.threads)
    reference = [exact(stretch) for stretch in stretches(ids, args.context)]

    def show(name: str, *values: float) -> None:
        print(f"{name:<34}" + "".join(f" {value:10.5f}" for value in values), flush=True)

    print(f"{args.model.name}, {len(reference)} stretches of {args.context} tokens\n")
    print(f"{'mean KL from fp32':<34} {'prompt':>10} {'answer':>10}")
    both = [divergence(rows, reference, ids, args.context) for rows in (prompt, answer)]
    show(f"mtmd, {dtype}", *both)
    settings = ""
    if args.openvino:
        try:
            *ways, settings = openvino(args.openvino, args.model, ids, args.context, args.threads)
            show(
                "OpenVINO GenAI", *(divergence(rows, reference, ids, args.context) for rows in ways)
            )
        except RuntimeError as error:
            print(f"OpenVINO GenAI: {error}")
    if args.llama_dir:
        more = args.llama_args.split()
        reported = llama_cpp(args.llama_dir, args.model, args.context, args.threads, more)
        show("llama.cpp", reported)
    if settings:
        print(f"\nOpenVINO's settings: {settings}")


if __name__ == "__main__":
    main()
