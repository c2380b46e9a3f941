"""The options by name and type, for type checkers and editors: `LoadOptions` and `AnswerOptions` of
config.py, which check them, as keywords, None for the default. A test keeps the two alike.
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


class LoadKeywords(TypedDict, total=False):
    """How a model is loaded: `LoadOptions` says what each means."""

    device: Device | None
    dtype: Dtype | None
    flash_attn: Literal["auto", "on", "off"] | None
    override_tensor: str | Sequence[str] | None
    refuse: str | Sequence[str] | None
    threads: int | None
    context: int | None
    mmproj: str | PathLike[str] | None
    chat_template: str | PathLike[str] | None
    image_min_tokens: int | None
    image_max_tokens: int | None
    parallel: int | None
    memory_limit: int | str | None
    isolate: bool | None
    speculate: int | str | None
    tp: int | None
    tensor_split: str | Sequence[float] | None
    no_kv_offload: bool | None
    split: Literal["none", "layer"] | None
    fit: bool | None
    kernels: str | PathLike[str] | None
    vision_attention: Literal["auto", "triton", "torch"] | None
    preprocess: Literal["auto", "host"] | None
    allow_remote_media: bool | None


class AnswerKeywords(TypedDict, total=False):
    """How an answer is generated: `AnswerOptions` and `Sampling` say what each means."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int | str, float] | Mapping[int, float] | Mapping[str, float] | None
    seed: int | None
    max_tokens: int | None
    ignore_eos: bool | None
    stop: str | Sequence[str] | None
    detail: Detail | None
    logprobs: int | bool | None
    prompt_logprobs: int | bool | None
    json_schema: Mapping[str, Any] | str | bool | type[Any] | None
    grammar: Mapping[str, Any] | str | None
    min_tokens: int | None
    stop_token_ids: Sequence[int] | None
    continue_final_message: bool | None
    tools: Sequence[Mapping[str, Any] | Tool] | Toolbox | None
    tool_choice: Mapping[str, Any] | str | None
    parallel_tool_calls: bool | None
    sampling: Literal["model", "greedy", "off"] | None
    stop_repeating: bool | None
    think: bool | str | None
    think_budget: int | None
    chat_template_kwargs: Mapping[str, Any] | None


class DescribeKeywords(LoadKeywords, AnswerKeywords, total=False):
    """Both, as `describe` takes them."""
