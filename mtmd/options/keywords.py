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
Task: TypeAlias = Literal[
    "markdown",
    "text",
    "table",
    "formula",
    "layout",
    "caption",
    "short-caption",
    "long-caption",
    "objects",
]
Path: TypeAlias = str | PathLike[str]


class LoadKeywords(TypedDict, total=False):
    """Describes how a model is loaded."""

    mmproj: str | PathLike[str] | None
    """the projector of a GGUF."""

    chat_template: str | PathLike[str] | None
    """a Jinja chat template to use instead of the model's own, or the name of a built-in one
    (`chatml`, ...; docs/templates.md).
    """

    lora: Path | Sequence[Path] | Mapping[str, Path] | None
    """a LoRA adapter: a PEFT folder, a GGUF file, or org/name. With a NAME, it applies to
    answers that select it (--adapter), otherwise to all answers; then it is merged into
    unquantized weights. SCALE multiplies its effect; may be repeated.
    """

    device: Device | None
    """auto, cpu, cuda:N, mps or xpu:N; several, separated by commas, with --split or --fit."""

    dtype: Dtype | None
    """type to compute in: fp32 (same tokens as transformers in fp32), bf16 (half the memory,
    prefill two to three times faster, rounded to three digits), or auto: bf16 if the device
    multiplies it natively, fp32 otherwise and for models below 16 MiB.
    """

    weights: str | None
    """quantize the decoder's weights when they are loaded: Q8_0, Q4_K_M, FP8 or another of F32,
    F16, BF16, Q8_0, Q6_K, Q5_K_M, Q5_K_S, Q5_1, Q5_0, Q4_K_M, Q4_K_S, IQ4_NL, IQ4_XS,
    MXFP4_MOE, Q4_1, Q4_0, Q3_K_L, Q3_K_M, Q3_K_S, Q2_K, Q2_K_S, FP8; with --random-weights,
    the type that they are made in.
    """

    flash_attn: Literal["auto", "on", "off"] | None
    """attention without a matrix of scores in memory: auto, on or off."""

    kv_type: str | None
    """the type in which keys and values are stored: q8_0 (half of the memory of bf16), fp8 (the
    same with coarser numbers), q4_0 (a quarter), bf16, fp32 or auto, the type that is
    computed in, but bf16 where a CPU has no bf16 instructions; or one for keys and one for
    values, such as q8_0/q4_0 or bf16/q8_0.
    """

    activations: Literal["auto", "int8"] | None
    """type to which activations are rounded in products of more than 24 rows, which read prompts
    and pictures: int8 (faster on CPUs without AMX, less exact; the decoder's quantized
    weights stay as they are, an encoder's plain ones are quantized to 8 bits when they are
    loaded; docs/running.md) or auto (nothing that makes them less exact).
    """

    override_tensor: str | Sequence[str] | None
    """run operations whose name, or whose weight's name, matches RE on DEVICE; may be repeated."""

    refuse: str | Sequence[str] | None
    """simulate a device that does not support OP, OP:head=72, OP:batch>1, OP:bf16 or OP:/NAME
    REGEX/; may be repeated.
    """

    threads: int | None
    """CPU threads of the whole process."""

    image_min_tokens: int | None
    """min tokens of one picture."""

    image_max_tokens: int | None
    """max tokens of one picture."""

    context: int | None
    """max length of prompt and answer together, in tokens."""

    parallel: int | None
    """answers computed at once; each has its own cache."""

    tp: int | None
    """split every layer among N processes (tensor parallelism), each on a GPU of its own if
    there are several.
    """

    split: Literal["none", "layer"] | None
    """layer: distribute the layers over the devices of --device, or over all GPUs; with one GPU,
    over it and the host.
    """

    tensor_split: str | Sequence[float] | None
    """shares of --tp's processes or --split's devices, such as 3,1."""

    fit: bool | None
    """choose where the model is placed (one device, layers over several, --tp, keys and values
    on the host, some layers there): the first way that is predicted to fit.
    """

    no_kv_offload: bool | None
    """keep keys and values in the host's memory, and run the decoder's attention there."""

    kernels: str | PathLike[str] | None
    """GPU programs compiled on another machine by 'mtmd warmup --target GPU --save DIR'."""

    vision_attention: Literal["auto", "triton", "torch"] | None
    """attention kernel of the encoder on a GPU: triton (mtmd's own), torch (torch's own, where
    supported), or auto: the one that the warm-up measured to be faster.
    """

    no_graphs: bool | None
    """on a GPU, launch each kernel anew in every step; without this option, a step that comes
    again is recorded as a CUDA graph and replayed, which is faster and takes more memory.
    """

    preprocess: Literal["auto", "host"] | None
    """where to resize and normalize pictures: host, or auto: on a GPU, in 120 MiB of its memory,
    if the result is equal to the bit.
    """

    speculate: int | str | None
    """speculative decoding: number of tokens to propose from prompt and answer; auto (as many as
    pay off), off, or a number. Answers stay the same.
    """

    memory_limit: int | str | None
    """max memory to use on the device, or on each GPU, such as 8GiB; pictures are scaled down to
    fit.
    """

    isolate: bool | None
    """decode pictures and compile JSON schemas in worker processes with limits on memory and
    time; for untrusted files.
    """

    allow_remote_media: bool | None
    """download pictures and videos from http(s) addresses, if they are public."""


class AnswerKeywords(TypedDict, total=False):
    """Describes how an answer is generated."""

    temperature: float | None
    """0 takes the most probable token, 1 samples from the model's probabilities."""

    top_k: int | None
    """sample from the K most probable tokens."""

    top_p: float | None
    """sample from the smallest set of tokens with total probability P."""

    min_p: float | None
    """sample from tokens at least P times as probable as the most probable one."""

    repetition_penalty: float | None
    """above 1, tokens that already occur become less probable."""

    frequency_penalty: float | None
    """subtracted from the logit of a token for each time it occurs in the answer."""

    presence_penalty: float | None
    """subtracted from the logits of tokens that occur in the answer."""

    logit_bias: Mapping[int | str, float] | Mapping[int, float] | Mapping[str, float] | None
    """numbers added to the logits of tokens, by token id."""

    no_repeat_ngram: int | None
    """no N tokens in a row occur twice in prompt and answer."""

    no_repeat_window: int | None
    """look for them among the last TOKENS alone."""

    no_repeat_except: Sequence[int] | None
    """id of a token that may complete a repetition anyway, such as the mark of a table's cell."""

    seed: int | None
    """random seed; equal seeds give equal answers."""

    max_tokens: int | None
    """max tokens of the answer; -1 for the end of the context."""

    adapter: str | Sequence[str] | Mapping[str, float] | None
    """answer with the LoRA adapter that was loaded under this name (--lora NAME=PATH); may be
    repeated.
    """

    detail: Detail | None
    """detail of pictures: auto, low (few tokens, no tiles) or high."""

    task: Task | None
    """ask for a task in the words of the model's authors, in place of a prompt: markdown, text,
    table, formula, layout (boxes with text), a caption, or objects (boxes with names); 'mtmd
    info' shows which the model has.
    """

    stop: str | Sequence[str] | None
    """end the answer before TEXT; may be repeated."""

    ignore_eos: bool | None
    """continue after the end-of-answer token."""

    sampling: Literal["model", "greedy", "off"] | None
    """which of the model's own sampling settings apply where you give none: model (all), greedy
    (its penalties), off (none); 'mtmd info' shows them.
    """

    stop_repeating: bool | None
    """stop an answer that loops."""

    think: bool | str | None
    """thinking: on, off, or an effort if the model supports it: minimal, low, medium, high,
    xhigh, max.
    """

    think_budget: int | None
    """end the thought after N tokens and start the answer."""

    chat_template_kwargs: Mapping[str, Any] | None
    """variables for the chat template, as a JSON object."""

    json_schema: Mapping[str, Any] | str | bool | type[Any] | None
    """a JSON schema that the answer must follow, as a file or as JSON text; {} is any JSON."""

    grammar: Mapping[str, Any] | str | None
    """what the answer must follow, in another notation: {"regex": ...}, {"choice": [...]},
    {"lark": ...} or {"gbnf": ...}, or a text in one of the last two.
    """

    min_tokens: int | None
    """min tokens of the answer."""

    stop_token_ids: Sequence[int] | None
    """ids of further tokens that end the answer."""

    logprobs: int | bool | None
    """log probability of each token, and of the N most probable ones (True: 0)."""

    prompt_logprobs: int | bool | None
    """as logprobs, for the prompt; only without pictures."""

    continue_final_message: bool | None
    """the answer continues the last message."""

    tools: Sequence[Mapping[str, Any] | Tool] | Toolbox | None
    """functions that the model may call, as OpenAI's interface describes them."""

    tool_choice: Mapping[str, Any] | str | None
    """none, auto, required, or one of the tools."""

    parallel_tool_calls: bool | None
    """whether an answer may have several calls."""


class DescribeKeywords(LoadKeywords, AnswerKeywords, total=False):
    """Both, as `describe` takes them."""
