"""The options by name and type, for type checkers and editors: `LoadOptions` and `AnswerOptions` of
config.py, which check them, as keywords. A test keeps the two alike.
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

    device: Device
    dtype: Dtype
    flash_attn: Literal["auto", "on", "off"]
    override_tensor: str | Sequence[str]
    refuse: str | Sequence[str]
    threads: int | None
    context: int | None
    mmproj: str | PathLike[str] | None
    chat_template: str | PathLike[str] | None
    image_min_tokens: int | None
    image_max_tokens: int | None
    parallel: int
    memory_limit: int | str | None
    isolate: bool
    speculate: int | str
    tp: int
    tensor_split: str | Sequence[float]
    no_kv_offload: bool
    split: Literal["none", "layer"]
    fit: bool
    kernels: str | PathLike[str] | None
    vision_attention: Literal["auto", "triton", "torch"]
    preprocess: Literal["auto", "host"]
    allow_remote_media: bool


class AnswerKeywords(TypedDict, total=False):
    """How an answer is generated: `AnswerOptions` and `Sampling` say what each means."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int | str, float] | Mapping[int, float] | Mapping[str, float]
    seed: int | None
    max_tokens: int
    ignore_eos: bool
    stop: str | Sequence[str]
    detail: Detail
    logprobs: int | None
    json_schema: Mapping[str, Any] | str | bool | type[Any] | None
    grammar: Mapping[str, Any] | str | None
    min_tokens: int
    stop_token_ids: Sequence[int]
    continue_final_message: bool
    tools: Sequence[Mapping[str, Any] | Tool] | Toolbox | None
    tool_choice: Mapping[str, Any] | str | None
    parallel_tool_calls: bool | None


class DescribeKeywords(LoadKeywords, AnswerKeywords, total=False):
    """Both, as `describe` takes them."""
