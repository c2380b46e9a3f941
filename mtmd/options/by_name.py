"""Options by name, in a dictionary as programs pass them through, and advice on wrong names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from mtmd.base.errors import OptionError
from mtmd.base.options import options_of
from mtmd.base.spelling import did_you_mean
from mtmd.options.answer import AnswerOptions
from mtmd.options.load import LoadOptions

ELSEWHERE = {  # options of other libraries, and what takes their place
    "stream": "load().stream(image, prompt) gives an answer word by word",
    "do_sample": "an answer is drawn where temperature is above 0; sampling='model' draws as the "
    "model's own settings say",
    "num_beams": "answers are sampled, or greedy: there is no beam search",
    "text": "that is `prompt`",
    "video": "pictures and videos are given as `image`",
    "videos": "pictures and videos are given as `image`",
    "audios": "audio is given as `audio`, or among the pictures as `image`",
    "n": "call it several times, with another `seed` each",
    "response_format": "json_schema takes a JSON schema, or True for any object",
    "regex": 'it is written grammar={"regex": ...}',
    "choice": 'it is written grammar={"choice": [...]}',
    "top_logprobs": "logprobs takes the number of them, or True for the tokens of the answer alone",
    "gpu_memory_utilization": 'memory_limit takes bytes, as "20GiB"',
    "load_in_4bit": "weights='Q4_K_M' quantizes at load; quantized folders are read as they are",
    "load_in_8bit": "weights='Q8_0' quantizes at load; quantized folders are read as they are",
    "quantization_config": "quantized folders are read as they are; weights='Q4_K_M' makes one",
    "n_gpu_layers": "a GPU is used if there is one; split='layer' shares it with the host",
    "trust_remote_code": "no code of a repository is ever run",
    "min_pixels": "image_min_tokens of `load` says what one picture takes at least",
    "max_pixels": "image_max_tokens of `load` says what one picture takes at most",
}
MEANT = {  # options of other programs under names of theirs, and ours
    "ctx_size": "context",
    "n_ctx": "context",
    "num_ctx": "context",
    "max_model_len": "context",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
    "predict": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens",
    "temp": "temperature",
    "question": "prompt",
    "query": "prompt",
    "repeat_penalty": "repetition_penalty",
    "n_threads": "threads",
    "num_thread": "threads",
    "max_num_seqs": "parallel",
    "n_parallel": "parallel",
    "num_workers": "parallel",
    "workers": "parallel",
    "batch_size": "parallel",
    "served_model_name": "alias",
    "system_prompt": "system",
    "tensor_parallel_size": "tp",
    "model_path": "model",
    "torch_dtype": "dtype",
    "cache_type_k": "kv_type",
    "cache_type_v": "kv_type",
    "ctk": "kv_type",
    "ctv": "kv_type",
    "type_k": "kv_type",
    "type_v": "kv_type",
    "kv_cache_dtype": "kv_type",
    "hf_repo": "model",
    "output": "out",
}
T = TypeVar("T")
OTHER_KEYWORDS: dict[Any, tuple[str, ...]] = {  # of calls that take options
    LoadOptions: ("model", "progress"),
    AnswerOptions: ("image", "prompt", "messages", "system"),
}


def options(kind: type[T], values: Mapping[str, Any]) -> T:
    """`kind(**values)`, with an OptionError for a name it does not have. None stands for what was
    not given, as programs have it that pass settings through.
    """
    return kind(**_known(values, kind))


def split_options(values: Mapping[str, Any]) -> tuple[LoadOptions, AnswerOptions]:
    """Options of both kinds in one dictionary, as `describe` takes them."""
    known = _known(values, LoadOptions, AnswerOptions)
    names = options_of(LoadOptions)
    return (
        LoadOptions(**{k: v for k, v in known.items() if k in names}),
        AnswerOptions(**{k: v for k, v in known.items() if k not in names}),
    )


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return it without those that are None, which is the default itself or stands for it."""
    return {name: value for name, value in values.items() if value is not None}


def _known(values: Mapping[str, Any], *kinds: Any) -> dict[str, Any]:
    names = [name for kind in kinds for name in options_of(kind)]
    for name in values:
        if name not in names:
            others = [other for kind in kinds for other in OTHER_KEYWORDS[kind] if other != name]
            raise OptionError(f"option {name!r:.60} is not known{_advice(name, names, others)}")
    return given(values)


def _advice(name: str, names: Sequence[str], others: Sequence[str]) -> str:
    """Return what to do about an option that is not among `names`; `others`: other keywords."""
    for kind, owner in ((AnswerOptions, "an answer"), (LoadOptions, "`load`")):
        if name in options_of(kind):
            return f" here; expected one of {', '.join(names)}: give it to {owner}"
    if name in ELSEWHERE:
        return f"; {ELSEWHERE[name]}"
    names = [*others, *names]
    return did_you_mean(str(name), names, MEANT) or f"; expected one of {', '.join(names)}"
