"""Options as keyword arguments, for type checkers and editors.
Written by `python tools/option_tables.py`; do not edit by hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

from mtmd.tools.tool import Tool, Toolbox

if TYPE_CHECKING:
    import torch

    Device: TypeAlias = str | torch.device
    Dtype: TypeAlias = Literal["auto", "bf16", "fp32", "bfloat16", "float32"] | torch.dtype
else:  # torch is not loaded for types
    Device, Dtype = str, str

Detail: TypeAlias = Literal["auto", "low", "high"]
Path: TypeAlias = str | PathLike[str]


class LoadKeywords(TypedDict, total=False):
    """Describes how a model is loaded."""

    mmproj: str | PathLike[str] | None
    """the projector of a GGUF."""

    chat_template: str | PathLike[str] | None
    """a Jinja chat template to use in place of the model's own, or the name of a built-in one
    (`chatml`, ...; docs/templates.md).
    """

    lora: Path | Sequence[Path] | Mapping[str, Path] | None
    """a LoRA adapter: a folder of PEFT, a GGUF, or org/name. One with a NAME is applied to
    answers that choose it (--adapter), another to all: it is merged into weights that are
    plain numbers. SCALE multiplies what it adds; may be repeated.
    """

    device: Device | None
    """auto, cpu, cuda:N, mps or xpu:N; several of cuda:N and cpu between commas with --split or
    --fit.
    """

    dtype: Dtype | None
    """the type that is computed in: fp32 (the tokens of transformers in fp32), bf16 (half the
    memory, prompts read two to three times faster, rounded to three digits) or auto: bf16
    where the device multiplies it, fp32 elsewhere and for models below 16 MiB.
    """

    weights: str | None
    """quantize the decoder's weights when they are loaded: Q8_0, Q4_K_M, FP8 or another of F32,
    F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, IQ4_NL, IQ4_XS,
    MXFP4_MOE, Q4_1, Q4_0, Q3_K_L, Q3_K_M, Q3_K_S, Q2_K, Q2_K_S, FP8; with --random-weights,
    the type that they are made in.
    """

    flash_attn: Literal["auto", "on", "off"] | None
    """attention that stores no matrix of scores: auto, on or off."""

    kv_type: str | None
    """the type in which keys and values are stored: q8_0 (half of the memory of bf16), fp8 (the
    same with coarser numbers), q4_0 (a quarter), bf16, fp32 or auto, the type that is
    computed in.
    """

    override_tensor: str | Sequence[str] | None
    """run nodes whose name, or weight's name, matches RE on DEVICE; may be repeated."""

    refuse: str | Sequence[str] | None
    """plan as if the device did not support OP, OP:head=72, OP:batch>1, OP:bf16 or OP:/NAME
    REGEX/; may be repeated.
    """

    threads: int | None
    """CPU threads, of the whole process."""

    image_min_tokens: int | None
    """min tokens of one picture."""

    image_max_tokens: int | None
    """max tokens of one picture."""

    context: int | None
    """longest sequence in tokens, answer included."""

    parallel: int | None
    """answers computed at once, each with a cache of its own."""

    tp: int | None
    """share every layer out among N processes, each with a GPU of its own where there are
    several.
    """

    split: Literal["none", "layer"] | None
    """layer: each device of --device, or each GPU, has a run of layers; one GPU and the host
    where there is one.
    """

    tensor_split: str | Sequence[float] | None
    """the shares of --tp's processes or --split's devices, such as 3,1."""

    fit: bool | None
    """choose how the model lies in memory (one device, layers over several, --tp, keys and
    values on the host, part of the layers there), the first way that is predicted to fit.
    """

    no_kv_offload: bool | None
    """keep keys and values in the host's memory, and run the decoder's attention there."""

    kernels: str | PathLike[str] | None
    """GPU programs compiled elsewhere, by 'mtmd warmup --target GPU --save DIR'."""

    vision_attention: Literal["auto", "triton", "torch"] | None
    """attention of the encoder on a GPU: triton (ours), torch (its own, where they take a node)
    or auto, what the warm-up has measured to be faster.
    """

    preprocess: Literal["auto", "host"] | None
    """resize and normalise pictures on the host, or auto: on a GPU, in 120 MiB of its memory,
    where that gives the same to the bit.
    """

    speculate: int | str | None
    """tokens of an answer to propose at once out of prompt and answer: auto (as many as pay),
    off or a number; answers are the same.
    """

    memory_limit: int | str | None
    """max memory of the device, or of each GPU, to take, like 8GiB; pictures are made smaller to
    fit.
    """

    isolate: bool | None
    """decode pictures, and follow JSON schemas, in worker processes with limits of memory and
    time; for files that others sent.
    """

    allow_remote_media: bool | None
    """pictures and videos may be http(s) addresses, too: what lies at public ones is fetched."""


class AnswerKeywords(TypedDict, total=False):
    """Describes how an answer is generated."""

    temperature: float | None
    """0 takes the most probable token, 1 draws."""

    top_k: int | None
    """draw from the K most probable tokens."""

    top_p: float | None
    """draw from the fewest tokens of probability P together."""

    min_p: float | None
    """draw from tokens at least P times as probable as the best."""

    repetition_penalty: float | None
    """above 1: make tokens already there less probable."""

    frequency_penalty: float | None
    """take so much off the logit of a token for each time it came in the answer."""

    presence_penalty: float | None
    """take so much off the logits of tokens that came in the answer."""

    logit_bias: Mapping[int | str, float] | Mapping[int, float] | Mapping[str, float] | None
    """numbers added to the logits of tokens, by their ids."""

    seed: int | None
    """of the random draws: equal seeds give equal answers."""

    max_tokens: int | None
    """longest answer, -1 for the end of the context."""

    adapter: str | Sequence[str] | Mapping[str, float] | None
    """answer with the LoRA adapter that was loaded by this name (--lora NAME=PATH); may be
    repeated.
    """

    detail: Detail | None
    """auto, low (few tokens, no tiles) or high."""

    stop: str | Sequence[str] | None
    """end the answer before TEXT; may be repeated."""

    ignore_eos: bool | None
    """go on past the end-of-answer token."""

    sampling: Literal["model", "greedy", "off"] | None
    """which of the model's own settings hold where no option is given: model (all), greedy (its
    penalties), off (none); 'mtmd info' shows them.
    """

    stop_repeating: bool | None
    """end an answer that says the same again and again."""

    think: bool | str | None
    """on or off, or how much where the model knows that: minimal, low, medium, high, xhigh, max."""

    think_budget: int | None
    """end the thought after N tokens, and begin the answer."""

    chat_template_kwargs: Mapping[str, Any] | None
    """variables for the chat template, as a JSON object."""

    json_schema: Mapping[str, Any] | str | bool | type[Any] | None
    """a JSON schema that the answer follows, in a file or as it is; {} is any JSON."""

    grammar: Mapping[str, Any] | str | None
    """what the answer follows in another notation: {"regex": ...}, {"choice": [...]}, {"lark":
    ...} or {"gbnf": ...}, or a text in one of the last two.
    """

    min_tokens: int | None
    """no token ends the answer before so many."""

    stop_token_ids: Sequence[int] | None
    """ids of tokens that end the answer, too."""

    logprobs: int | bool | None
    """log probabilities of each token, and of so many of the most probable ones (True: 0)."""

    prompt_logprobs: int | bool | None
    """as logprobs, of the prompt, which has no pictures then."""

    continue_final_message: bool | None
    """the last message is the beginning of the answer."""

    tools: Sequence[Mapping[str, Any] | Tool] | Toolbox | None
    """functions that the model may call, as OpenAI's interface describes them."""

    tool_choice: Mapping[str, Any] | str | None
    """none, auto, required, or one of the tools."""

    parallel_tool_calls: bool | None
    """whether an answer may have several calls."""


class DescribeKeywords(LoadKeywords, AnswerKeywords, total=False):
    """Both, as `describe` takes them."""
