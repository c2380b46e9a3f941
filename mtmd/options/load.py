"""Describes how a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.options import (
    FLAG,
    SIZE,
    Kind,
    check_options,
    one_of,
    option,
    path,
    refuse,
    texts,
    whole,
)
from mtmd.kernels.checkpoint.mixtures import ALIASES, MIXTURES
from mtmd.options.adapters import LOADED

DTYPES = ("auto", "bf16", "fp32")
DTYPES_ELSEWHERE = {  # as torch, transformers and vLLM write them
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float32": "fp32",
    "torch.float32": "fp32",
}
KV_ROWS = ("bf16", "fp32", "q8_0", "q4_0", "fp8")  # types that keys and values can have each
KV_TYPES = ("auto", *KV_ROWS)
KV_TYPES_ELSEWHERE = DTYPES_ELSEWHERE | {"f32": "fp32", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}
SPECULATE = ("auto", "off")
PROPOSED_MAX = 32
RANKS_MAX = 64
PARALLEL_MAX = 1024  # answers computed at once
EMBEDDER_OPTIONS = (  # that models which give vectors have, too
    *("device", "dtype", "flash_attn", "override_tensor", "refuse", "threads"),
    "preprocess",
)
RERANKER_OPTIONS = (  # that models which give scores have
    *EMBEDDER_OPTIONS,
    *("mmproj", "weights", "kv_type", "context", "image_min_tokens", "image_max_tokens"),
    *("memory_limit", "vision_attention", "no_graphs", "isolate", "allow_remote_media"),
)


def _device(name: str, value: object) -> str:
    if type(value).__module__ == "torch" and type(value).__name__ == "device":
        value = str(value)
    if not isinstance(value, str) or not value:
        refuse(name, value, 'a text that is not empty, such as "cpu" or "cuda:0"')
    return value


def _dtype(name: str, value: object) -> str:
    text = DTYPES_ELSEWHERE.get(str(value), value)
    if str(text).removeprefix("torch.") in ("float16", "fp16", "half", "f16"):
        raise OptionError(
            f"{name}: found {text!s:.20}, expected one of {', '.join(DTYPES)}; fp16 is left out as "
            "large activations of these models overflow in it, and bf16 takes the same memory"
        )
    return str(one_of(*DTYPES).check(name, text))


def _weights(name: str, value: object) -> str:
    text = str(value).upper()
    return str(one_of(*MIXTURES).check(name, ALIASES.get(text, text)))


def _kv_type(name: str, value: object) -> str:
    """One type for both, or `keys/values`."""
    kinds = [KV_TYPES_ELSEWHERE.get(kind, kind) for kind in str(value).lower().split("/")]
    if len(set(kinds)) == 1 and len(kinds) <= 2:
        return str(one_of(*KV_TYPES).check(name, kinds[0]))
    if len(kinds) != 2 or not {*kinds} <= {*KV_ROWS}:
        one, other = ", ".join(KV_TYPES), ", ".join(KV_ROWS)
        refuse(name, value, f"one of {one}, or KEYS/VALUES, each one of {other}")
    return "/".join(kinds)


def _speculate(name: str, value: object) -> int | str:
    """A number also as text, as a command has it."""
    if isinstance(value, str) and value in SPECULATE:
        return value
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is not int or not 1 <= number <= PROPOSED_MAX:
        refuse(name, value, f"auto, off, or a number from 1 to {PROPOSED_MAX}")
    return number


@dataclass(frozen=True)
class LoadOptions:
    """Describes how a model is loaded. Raises OptionError naming the field, what was found and what
    is expected.
    """

    mmproj: str | None = option(
        None, path(), "the projector of a GGUF", default="the one in the same folder", preset=True
    )
    chat_template: str | None = option(
        None,
        path("FILE|NAME"),
        "a Jinja chat template to use instead of the model's own, or the name of a built-in one"
        " (`chatml`, ...; docs/templates.md)",
        preset=True,
    )
    lora: tuple[str, ...] = option(
        (),
        LOADED,
        "a LoRA adapter: a PEFT folder, a GGUF file, or org/name. With a NAME, it applies to "
        "answers that select it (--adapter), otherwise to all answers; then it is merged into "
        "unquantized weights. SCALE multiplies its effect; may be repeated",
        preset=True,
    )
    device: str = option(
        "auto",
        Kind(_device, "Device", metavar="DEVICE"),
        "auto, cpu, cuda:N, mps or xpu:N; several, separated by commas, with --split or --fit",
        suggested=("auto", "cpu", "cuda", "mps", "xpu"),
    )
    dtype: str = option(
        "auto",
        Kind(_dtype, "Dtype", values=DTYPES, metavar="TYPE"),
        "type to compute in: fp32 (same tokens as transformers in fp32), bf16 (half the memory,"
        " prefill two to three times faster, rounded to three digits), or auto: bf16 if the "
        "device multiplies it natively, fp32 otherwise and for models below 16 MiB",
        preset=True,
    )
    weights: str | None = option(
        None,
        Kind(_weights, "str", values=tuple(MIXTURES), metavar="TYPE"),
        "quantize the decoder's weights when they are loaded: Q8_0, Q4_K_M, FP8 or another of "
        f"{', '.join(MIXTURES)}; with --random-weights, the type that they are made in",
        default="as stored",
        preset=True,
    )
    flash_attn: str = option(
        "auto",
        one_of("auto", "on", "off", metavar="WHEN"),
        "attention without a matrix of scores in memory: auto, on or off",
        preset=True,
    )
    kv_type: str = option(
        "auto",
        Kind(_kv_type, "str", values=(*KV_TYPES, "q8_0/q4_0"), metavar="TYPE"),
        "the type in which keys and values are stored: q8_0 (half of the memory of bf16), fp8 "
        "(the same with coarser numbers), q4_0 (a quarter), bf16, fp32 or auto, the type that is "
        "computed in, but bf16 where a CPU has no bf16 instructions; or one for keys and one for "
        "values, such as q8_0/q4_0 or bf16/q8_0",
        preset=True,
    )
    activations: str = option(
        "auto",
        one_of("auto", "int8", metavar="TYPE"),
        "type to which activations are rounded in products of more than 24 rows, which read "
        "prompts and pictures: int8 (faster on CPUs without AMX, less exact; the decoder's "
        "quantized weights stay as they are, an encoder's plain ones are quantized to 8 bits when "
        "they are loaded; docs/running.md) or auto (nothing that makes them less exact)",
        preset=True,
    )
    override_tensor: tuple[str, ...] = option(
        (),
        texts("RE=DEVICE"),
        "run operations whose name, or whose weight's name, matches RE on DEVICE; may be repeated",
        preset=True,
    )
    refuse: tuple[str, ...] = option(
        (),
        texts("RULE"),
        "simulate a device that does not support OP, OP:head=72, OP:batch>1, OP:bf16 or OP:/NAME "
        "REGEX/; may be repeated",
        preset=True,
    )
    threads: int | None = option(
        None,
        whole(1, 1024),
        "CPU threads of the whole process",
        default=(
            "torch's choice, 1 for a very small model; for decoding, the number measured to be "
            "fastest"
        ),
    )
    image_min_tokens: int | None = option(
        None, whole(1, 1 << 20), "min tokens of one picture", default="the model's", preset=True
    )
    image_max_tokens: int | None = option(
        None, whole(1, 1 << 20), "max tokens of one picture", default="the model's", preset=True
    )
    context: int | None = option(
        None,
        whole(16, 1 << 24),
        "max length of prompt and answer together, in tokens",
        default="the model's, at most 8192",
        preset=True,
    )
    parallel: int = option(
        4, whole(1, PARALLEL_MAX), "answers computed at once; each has its own cache", preset=True
    )
    tp: int = option(
        1,
        whole(1, RANKS_MAX),
        "split every layer among N processes (tensor parallelism), each on a GPU of its own if "
        "there are several",
    )
    split: str = option(
        "none",
        one_of("none", "layer", metavar="HOW"),
        "layer: distribute the layers over the devices of --device, or over all GPUs; with one "
        "GPU, over it and the host",
    )
    tensor_split: tuple[float, ...] = option(
        (),
        Kind(lambda _, value: value, "str | Sequence[float]", metavar="SHARES"),
        "shares of --tp's processes or --split's devices, such as 3,1",
        default="equal; for devices, by free memory",
    )
    fit: bool = option(
        False,
        FLAG,
        "choose where the model is placed (one device, layers over several, --tp, keys and "
        "values on the host, some layers there): the first way that is predicted to fit",
    )
    no_kv_offload: bool = option(
        False,
        FLAG,
        "keep keys and values in the host's memory, and run the decoder's attention there",
        preset=True,
    )
    kernels: str | None = option(
        None,
        path("DIR"),
        "GPU programs compiled on another machine by 'mtmd warmup --target GPU --save DIR'",
        default="the folder in MTMD_KERNELS",
    )
    vision_attention: str = option(
        "auto",
        one_of("auto", "triton", "torch", metavar="KERNEL"),
        "attention kernel of the encoder on a GPU: triton (mtmd's own), torch (torch's own, "
        "where supported), or auto: the one that the warm-up measured to be faster",
        preset=True,
    )
    no_graphs: bool = option(
        False,
        FLAG,
        "on a GPU, launch each kernel anew in every step; without this option, a step that comes "
        "again is recorded as a CUDA graph and replayed, which is faster and takes more memory",
        preset=True,
    )
    preprocess: str = option(
        "auto",
        one_of("auto", "host", metavar="WHERE"),
        "where to resize and normalize pictures: host, or auto: on a GPU, in 120 MiB of its "
        "memory, if the result is equal to the bit",
        preset=True,
    )
    speculate: int | str = option(
        "auto",
        Kind(_speculate, "int | str", metavar="HOW"),
        "speculative decoding: number of tokens to propose from prompt and answer; auto (as "
        "many as pay off), off, or a number. Answers stay the same",
        preset=True,
    )
    memory_limit: int | str | None = option(
        None,
        SIZE,
        "max memory to use on the device, or on each GPU, such as 8GiB; pictures are scaled "
        "down to fit",
        default="the free memory",
    )
    isolate: bool = option(
        False,
        FLAG,
        "decode pictures and compile JSON schemas in worker processes with limits on memory and"
        " time; for untrusted files",
    )
    allow_remote_media: bool = option(
        False, FLAG, "download pictures and videos from http(s) addresses, if they are public"
    )

    def __post_init__(self) -> None:
        check_options(self)
        low, high = self.image_min_tokens, self.image_max_tokens
        if low is not None and high is not None and low > high:
            raise OptionError(
                f"image_min_tokens is {low}, image_max_tokens {high}; expected the first to be "
                "no more than the second"
            )
        several = None if self.split == "layer" else self.tp
        object.__setattr__(self, "tensor_split", _checked_shares(self.tensor_split, several))
        _check_layout(self)


def _checked_shares(value: object, ranks: int | None) -> tuple[float, ...]:
    """Also as text, as a command has it: 3,1; of any number where there are None `ranks`."""
    items: Any = [v for v in value.split(",") if v] if isinstance(value, str) else value
    expected = (
        "positive numbers, one for each device"
        if ranks is None
        else f"{ranks} positive numbers, one for each of tp's ranks"
    )
    try:
        shares = tuple(float(item) for item in items)
    except (TypeError, ValueError):
        refuse("tensor_split", value, expected)
    if shares and (len(shares) != (ranks or len(shares)) or not all(0 < s < 1e6 for s in shares)):
        refuse("tensor_split", value, expected)
    return shares


def _check_layout(chosen: LoadOptions) -> None:
    """Raises OptionError for two ways at once in which a model could lie."""
    if chosen.split == "layer" and chosen.tp > 1:
        raise OptionError("split layer: found with tp, expected one of them")
    others = {
        "tp": chosen.tp > 1,
        "split": chosen.split != "none",
        "tensor_split": bool(chosen.tensor_split),
        "no_kv_offload": chosen.no_kv_offload,
    }
    if chosen.fit and any(others.values()):
        name = next(name for name, given in others.items() if given)
        raise OptionError(f"fit: found with {name}, which it chooses; give one of them")
