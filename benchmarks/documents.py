"""One page through this project, llama.cpp and transformers, taking turns in one run: encode it,
read the prompt with it, write an answer.

    python benchmarks/documents.py FOLDER                   a checkpoint in transformers' layout
    python benchmarks/documents.py FOLDER --published       its family's published size, random
    python benchmarks/documents.py FOLDER --published --decoder-layers 4 --rounds 5
    python benchmarks/documents.py FOLDER --llama-dir ~/llama.cpp/build/bin --page scan.png

All three read the same weights in BF16: this project and transformers FOLDER's safetensors, and
compute in --dtype (fp32 for a CPU that does not multiply bf16), llama-mtmd-cli (on PATH or in
--llama-dir) what `mtmd convert` makes of them. --published keeps
FOLDER's tokenizer, template and kind of model, and takes the sizes of GLM-OCR, DeepSeek-OCR 2 or
MiniCPM-V 4.6 with random weights; --decoder-layers then leaves layers of the decoder out. Without
--page, a page of words is drawn, 1,240 x 1,754 pixels. Every measurement is a process of its own
with --threads threads; the picture's tiles count as one encode. Ratios above 1 say that this
project is faster: best of all rounds, and median.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers import llama_version, machine, output, program

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "families"))

TOKENS = 32  # of an answer
PROMPT = "Text Recognition:"
STAGES = ("encode", "read", "write")
TIMEOUT_S = 1800

# Published sizes, where they differ from what the family's configuration in transformers says.
SIZES: dict[str, dict[str, Any]] = {
    "glm_ocr": {
        "vision_config": {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": 1536,
            "image_size": 336,
        },
        "text_config": {
            "vocab_size": 59392,
            "hidden_size": 1536,
            "intermediate_size": 4608,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_parameters": {
                "mrope_section": [16, 24, 24],
                "partial_rotary_factor": 1.0,
                "rope_theta": 10000.0,
                "rope_type": "default",
            },
        },
    },
    "deepseek_ocr2": {
        "vision_config": {
            "encoder_config": {
                "hidden_size": 896,
                "intermediate_size": 4864,
                "num_hidden_layers": 24,
                "num_attention_heads": 14,
                "num_key_value_heads": 2,
                "layer_types": ["full_attention"] * 24,
            },
            "sam_config": {
                "hidden_size": 768,
                "mlp_dim": 3072,
                "num_hidden_layers": 12,
                "num_attention_heads": 12,
                "global_attn_indexes": [2, 5, 8, 11],
                "output_channels": 256,
                "downsample_channels": [512, 896],
                "initializer_range": 0.02,
            },
        },
        "text_config": {
            "vocab_size": 129280,
            "hidden_size": 1280,
            "intermediate_size": 6848,
            "moe_intermediate_size": 896,
            "num_hidden_layers": 12,
            "num_attention_heads": 10,
            "num_key_value_heads": 10,
            "head_dim": 128,
            "n_routed_experts": 64,
            "num_experts_per_tok": 6,
            "mlp_layer_types": ["dense"] + ["sparse"] * 11,
        },
    },
    "minicpmv4_6": {
        "image_size": 448,
        "insert_layer_id": 6,
        "vision_config": {
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_hidden_layers": 27,
            "num_attention_heads": 16,
            "image_size": 980,
            "insert_layer_id": 6,
        },
        "text_config": {
            "vocab_size": 248320,
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 6,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000.0,
                "rope_type": "default",
            },
        },
    },
}
POSITIONS = 32_768  # a page of GLM-OCR's is 2,793 tokens
# What their processors do with a page.
PIXELS: dict[str, dict[str, Any]] = {
    "glm_ocr": {"size": {"longest_edge": 9633792, "shortest_edge": 12544}},
    "deepseek_ocr2": {},
    "minicpmv4_6": {"scale_resolution": 448},
}
MORE = ("downsample_ratio",)  # of a processor's settings, what its class asks for
NAMES = {"bf16": "bfloat16", "fp32": "float32"}
Times = dict[str, float]  # seconds by stage; of "write", a token


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, folders of values likewise; `rope_parameters` whole."""
    result = dict(base)
    for key, value in over.items():
        inner = isinstance(value, dict) and key != "rope_parameters"
        result[key] = merged(base.get(key, {}), value) if inner else value
    return result


def published(source: Path, target: Path, layers: int | None) -> None:
    """Write a checkpoint of `source`'s family in its published size, with random weights, into
    `target`. `layers` are those of the decoder that are kept (None: all).
    """
    import torch
    import transformers

    config = json.loads((source / "config.json").read_text())
    kind = config["model_type"]
    if kind not in SIZES:
        sys.exit(f"{source}: no published size is known of {kind}, only of {', '.join(SIZES)}")
    config = merged(config, SIZES[kind])
    text = config["text_config"]
    text["num_nextn_predict_layers"] = 0
    for values in (config, text):
        if "max_position_embeddings" in values:
            values["max_position_embeddings"] = POSITIONS
    if layers is not None:
        text["num_hidden_layers"] = layers
        for key in ("layer_types", "mlp_layer_types"):
            if key in text:
                text[key] = text[key][:layers]
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in {".json", ".jinja"} and path.name != "config.json":
            values = path.read_text()
            if path.name == "preprocessor_config.json":
                values = json.dumps(merged(json.loads(values), PIXELS[kind]))
            if path.name == "processor_config.json":
                whole = json.loads(values)
                whole["image_processor"] = merged(whole["image_processor"], PIXELS[kind])
                values = json.dumps(whole)
            (target / path.name).write_text(values)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    settings = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForImageTextToText.from_config(settings)
    model.save_pretrained(target)


def page(path: Path) -> None:
    """Draw words on an A4 page at 150 dots an inch."""
    from PIL import Image, ImageDraw, ImageFont

    picture = Image.new("RGB", (1240, 1754), "white")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(22)
    words = "The quick brown fox jumps over the lazy dog, and 1,234 others follow it. " * 2
    for line in range(52):
        draw.text((90, 90 + 30 * line), words[line % 40 :][:92], "black", font)
    picture.save(path)


def our_times(folder: Path, picture: Path, threads: int, dtype: str) -> Times:
    import torch
    from PIL import Image

    from mtmd import load

    torch.set_num_threads(threads)
    model = load(folder, threads=threads, dtype=dtype)
    with Image.open(picture) as opened:
        other = opened.convert("RGB")
    model.answer(other, PROMPT, max_tokens=TOKENS, temperature=0)
    other.putpixel((0, 0), (1, 2, 3))  # another picture: nothing of the first one is used again
    receipt = model.answer(other, PROMPT, max_tokens=TOKENS, temperature=0).receipt
    return {
        "encode": receipt.encode_ms / 1e3,
        "read": receipt.prefill_ms / 1e3,
        "write": receipt.decode_ms / 1e3 / max(receipt.output_tokens - 1, 1),
        "tokens": receipt.prompt_tokens,
    }


def transformers_times(folder: Path, picture: Path, threads: int, dtype: str) -> Times:
    import torch
    import transformers
    from common import build_processor
    from PIL import Image
    from torchvision_stand_in import torchvision_here

    torch.set_num_threads(threads)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=NAMES[dtype], attn_implementation="sdpa"
    ).eval()
    settings = json.loads((folder / "processor_config.json").read_text())
    kind = getattr(transformers, settings["processor_class"])
    parts = [{"type": "image", "image": Image.open(picture)}, {"type": "text", "text": PROMPT}]
    with torchvision_here():
        images = transformers.AutoImageProcessor.from_pretrained(folder)
        more = {key: settings[key] for key in MORE if key in settings}
        videos = "video_processor" in kind.get_attributes()
        inputs = build_processor(kind, folder, images, videos=videos, **more).apply_chat_template(
            [{"role": "user", "content": parts}],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
    encode_s = 0.0
    features = model.model.get_image_features

    def timed(*args: object, **settings: object) -> object:
        nonlocal encode_s
        start = time.perf_counter()
        result = features(*args, **settings)
        encode_s += time.perf_counter() - start
        return result

    model.model.get_image_features = timed
    result: Times = {}
    with torch.inference_mode():
        for _ in range(2):
            encode_s, start = 0.0, time.perf_counter()
            state = model(**inputs, use_cache=True, logits_to_keep=1)
            read_s = time.perf_counter() - start - encode_s
            start = time.perf_counter()
            for _ in range(TOKENS - 1):
                token = state.logits[:, -1:].argmax(-1)
                state = model(input_ids=token, past_key_values=state.past_key_values)
            write_s = (time.perf_counter() - start) / (TOKENS - 1)
            result = {"encode": encode_s, "read": read_s, "write": write_s}
    return {**result, "tokens": inputs["input_ids"].shape[1]}


def llama_times(cli: str, gguf: Path, picture: Path, threads: int) -> Times:
    """Sums over the slices of the picture, as llama-mtmd-cli reports them."""
    command = [cli, "-m", str(gguf), "--mmproj", str(gguf.with_name(f"mmproj-{gguf.name}"))]
    command += ["--image", str(picture), "-p", PROMPT, "-n", str(TOKENS), "-t", str(threads)]
    command += ["--jinja", "--temp", "0", "--ignore-eos", "-c", "16384"]
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
    )
    text = done.stdout.decode(errors="replace")

    def values_of(pattern: str) -> list[float]:
        values = [float(value) for value in re.findall(pattern, text)]
        if not values:
            raise RuntimeError(f"llama-mtmd-cli: {text[-300:]!r}")
        return values

    encode_s = sum(values_of(r"encoded in (\d+(?:\.\d+)?) ms")) / 1e3
    prompt_s = sum(values_of(r"prompt eval time = +([\d.]+) ms")) / 1e3
    tokens = values_of(r"prompt eval time = .*?/ +(\d+) tokens")[0]
    write_s = values_of(r"[^t] eval time = .*?\( *([\d.]+) ms per token")[0] / 1e3
    return {"encode": encode_s, "read": prompt_s, "write": write_s, "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--published", action="store_true", help="its family's published size")
    parser.add_argument("--decoder-layers", type=int, help="layers of the decoder that are kept")
    parser.add_argument("--page", type=Path, help="a picture (default: a page of words)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=tuple(NAMES), default="bf16", help="of products")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-dir", type=Path, help="the folder of llama-mtmd-cli")
    parser.add_argument("--worker", choices=("mtmd", "transformers"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        times = our_times if args.worker == "mtmd" else transformers_times
        print(json.dumps(times(args.folder, args.page, args.threads, args.dtype)))
        return
    with tempfile.TemporaryDirectory() as folder:
        report(args, Path(folder))


def report(args: argparse.Namespace, folder: Path) -> None:
    from mtmd.convert.convert import convert

    source = args.folder
    if args.published:
        source = folder / "checkpoint"
        published(args.folder, source, args.decoder_layers)
    picture = args.page
    if picture is None:
        page(picture := folder / "page.png")
    cli = program("llama-mtmd-cli", args.llama_dir)
    print(machine())
    if cli:
        print(f"llama-mtmd-cli: {llama_version(cli)}")
        convert(source, folder / "model.gguf", to="BF16")

    def worker(name: str) -> Times:
        command = [sys.executable, __file__, str(source), "--worker", name]
        command += ["--page", str(picture), "--threads", str(args.threads)]
        command += ["--dtype", args.dtype]
        result: Times = json.loads(output(command).splitlines()[-1])
        return result

    who = {"mtmd": lambda: worker("mtmd"), "transformers": lambda: worker("transformers")}
    if cli:
        who["llama.cpp"] = lambda: llama_times(cli, folder / "model.gguf", picture, args.threads)
    rounds: dict[str, list[Times]] = {name: [] for name in who}
    for _ in range(args.rounds):
        for name, measure in list(who.items()):
            try:
                rounds[name].append(measure())
            except RuntimeError as error:
                print(f"{name}: {error}", file=sys.stderr)
                del who[name]
    print(f"{'ms':<14}" + "".join(f"{stage:>12}" for stage in (*STAGES, "tokens")))
    for name, times in rounds.items():
        if times:
            best = [min(t[stage] for t in times) * 1e3 for stage in STAGES]
            print(f"{name:<14}" + "".join(f"{ms:>12.1f}" for ms in best), end="")
            print(f"{times[0]['tokens']:>12.0f}")
    for name, times in rounds.items():
        if times and name != "mtmd":
            ratios = []
            for stage in STAGES:
                pair = [[t[stage] for t in of] for of in (times, rounds["mtmd"])]
                best_of, middle = (f(pair[0]) / f(pair[1]) for f in (min, statistics.median))
                ratios.append(f"{stage} {best_of:.2f} ({middle:.2f})")
            print(f"{name} / mtmd: {', '.join(ratios)}")


if __name__ == "__main__":
    main()
