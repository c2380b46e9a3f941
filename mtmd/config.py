"""Options, checked once at the border: the same for Python, the command line and every later
face.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mtmd.base.errors import OptionError
from mtmd.base.options import integer, integer_or_none, refuse, size_or_none
from mtmd.base.spelling import did_you_mean
from mtmd.clip.token_budget import DETAILS
from mtmd.llm.sampling.grammar_notations import grammar_source
from mtmd.llm.sampling.json_schema import schema_text
from mtmd.llm.sampling.options import WAYS, AppliedSampling, Sampling
from mtmd.thinking.request import EFFORTS, ThinkingRequest, checked_variables
from mtmd.tools.tool import Tool, Toolbox, read_toolbox

DTYPES = ("auto", "bf16", "fp32")
DTYPES_ELSEWHERE = {  # as torch, transformers and vLLM write them
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "float32": "fp32",
    "torch.float32": "fp32",
}
FLASH = ("auto", "on", "off")
VISION_ATTENTION = ("auto", "triton", "torch")
PREPROCESS = ("auto", "host")
SPECULATE = ("auto", "off")
SPLITS = ("none", "layer")
MOST_PROPOSED = 32
MOST_RANKS = 64
TOKENS_MAX = 1 << 20
WHOLE_CONTEXT = -1  # as max_tokens: llama.cpp and Ollama write it so
PARALLEL_MAX = 1024  # answers computed at once
# Of files that are taken for pictures where none is named: in folders, and dropped on a terminal.
# One that is named may have any.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".heif"),
    *(".gif", ".bmp", ".tif", ".tiff", ".pdf"),
)
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
ELSEWHERE = {  # options of other libraries, and what takes their place
    "stream": "load().stream(image, prompt) gives an answer word by word",
    "do_sample": "an answer is drawn where temperature is above 0; sampling='model' draws as the "
    "model's own settings say",
    "num_beams": "answers are sampled, or greedy: there is no beam search",
    "text": "that is `prompt`",
    "video": "pictures and videos are given as `image`",
    "videos": "pictures and videos are given as `image`",
    "n": "call it several times, with another `seed` each",
    "response_format": "json_schema takes a JSON schema, or True for any object",
    "regex": 'it is written grammar={"regex": ...}',
    "choice": 'it is written grammar={"choice": [...]}',
    "top_logprobs": "logprobs takes the number of them, or True for the tokens of the answer alone",
    "gpu_memory_utilization": 'memory_limit takes bytes, as "20GiB"',
    "load_in_4bit": "quantized weights come as GGUF: load('org/name:Q4_K_M')",
    "load_in_8bit": "quantized weights come as GGUF: load('org/name:Q8_0')",
    "quantization_config": "quantized weights come as GGUF: load('org/name:Q4_K_M')",
    "n_gpu_layers": "a GPU is taken where there is one; split='layer' shares it with the host",
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
    "hf_repo": "model",
    "output": "out",
}
STOPS_MAX = 16
STOP_CHARS_MAX = 256
STOP_IDS_MAX = 256
T = TypeVar("T")


@dataclass(frozen=True)
class LoadOptions:
    """How a model is loaded. `mmproj` is the projector file of a GGUF, None for the one beside it;
    `chat_template` a file to use in place of the checkpoint's template, or the name of a
    built-in one (docs/templates.md). `image_min_tokens`,
    `image_max_tokens`: what one picture may take, None for the checkpoint's own limits. `parallel`
    answers are computed at once at most, each of a `context` of so many tokens, None for what the
    checkpoint was made for, at most 8192. `override_tensor` are "REGEX=DEVICE" on node and weight
    names; `refuse` are rules of ops the device is to be taken not to support; `threads` holds for
    the whole process. `memory_limit`: the most of the device's memory, of each of several
    accelerators, to take for weights, caches and all but some 120 MiB in which pictures are resized
    (`preprocess`), in bytes or as "8GiB", None for what is free when the model is loaded.
    `isolate`: picture files are decoded, and JSON schemas followed, in worker processes with limits
    of memory and time; for what others send. `speculate`: how many tokens of an answer to propose
    at once from what stands in prompt and answer, "auto" for as many as pay, by measurement, or
    "off"; answers are the same. `tp`: so many processes share every layer out among themselves
    (tensor parallelism), each with a device of its own where there are several; `split` "layer" has
    one process with a run of layers on each of its devices, which `device` may then name between
    commas; `tensor_split` are the ranks' or the devices' shares, such as (3, 1), where there are
    none equal ones for ranks, for devices what their free memory allows. `no_kv_offload`: keys and
    values lie in the host's memory, and attention of the decoder runs there. `fit`: which of all
    that is done is chosen, by predicted memory. `kernels` is a folder of programs that `mtmd warmup
    --save` compiled for the GPU, None for that which MTMD_KERNELS names, if any and where the
    device is a GPU. `vision_attention`: the kernel of the encoder's attention on a GPU, "triton"
    for ours, "torch" for the fastest of torch's own where they take a node, "auto" for what the
    warm-up has measured to be faster. `preprocess`: "host" has pictures resized and normalised by
    the CPU, "auto" on a GPU where that gives the same to the bit. `allow_remote_media`: pictures
    and videos may be http(s) addresses, which are fetched where they are public.
    """

    device: str = "auto"
    dtype: str = "auto"
    flash_attn: str = "auto"
    override_tensor: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    threads: int | None = None
    context: int | None = None
    mmproj: str | None = None
    chat_template: str | None = None
    image_min_tokens: int | None = None
    image_max_tokens: int | None = None
    parallel: int = 4
    memory_limit: int | str | None = None
    isolate: bool = False
    speculate: int | str = "auto"
    tp: int = 1
    tensor_split: tuple[float, ...] = ()
    no_kv_offload: bool = False
    split: str = "none"
    fit: bool = False
    kernels: str | None = None
    vision_attention: str = "auto"
    preprocess: str = "auto"
    allow_remote_media: bool = False

    def __post_init__(self) -> None:
        for name in ("mmproj", "chat_template", "kernels"):
            object.__setattr__(self, name, _path_or_none(name, getattr(self, name)))
        for name in ("image_min_tokens", "image_max_tokens"):
            object.__setattr__(self, name, integer_or_none(name, getattr(self, name), 1, 1 << 20))
        least, most = self.image_min_tokens, self.image_max_tokens
        if least is not None and most is not None and least > most:
            raise OptionError(
                f"image_min_tokens is {least}, image_max_tokens {most}; expected the first to be "
                "no more than the second"
            )
        object.__setattr__(self, "parallel", integer("parallel", self.parallel, 1, PARALLEL_MAX))
        object.__setattr__(self, "memory_limit", size_or_none("memory_limit", self.memory_limit))
        if str(self.dtype) in DTYPES_ELSEWHERE:
            object.__setattr__(self, "dtype", DTYPES_ELSEWHERE[str(self.dtype)])
        _check_dtype(self.dtype)
        _among("flash_attn", self.flash_attn, FLASH)
        _among("split", self.split, SPLITS)
        _among("vision_attention", self.vision_attention, VISION_ATTENTION)
        _among("preprocess", self.preprocess, PREPROCESS)
        for name in ("isolate", "no_kv_offload", "fit", "allow_remote_media"):
            if type(getattr(self, name)) is not bool:
                refuse(name, getattr(self, name), "true or false")
        object.__setattr__(self, "speculate", _speculate(self.speculate))
        device = self.device
        if type(device).__module__ == "torch" and type(device).__name__ == "device":
            object.__setattr__(self, "device", str(device))
        if not isinstance(self.device, str) or not self.device:
            refuse("device", self.device, 'a text that is not empty, such as "cpu" or "cuda:0"')
        for name in ("override_tensor", "refuse"):
            object.__setattr__(self, name, _texts(name, getattr(self, name)))
        object.__setattr__(self, "threads", integer_or_none("threads", self.threads, 1, 1024))
        object.__setattr__(self, "context", integer_or_none("context", self.context, 16, 1 << 24))
        object.__setattr__(self, "tp", integer("tp", self.tp, 1, MOST_RANKS))
        several = None if self.split == "layer" else self.tp
        object.__setattr__(self, "tensor_split", _shares(self.tensor_split, several))
        _check_layout(self)


@dataclass(frozen=True)
class PresetSampling:
    """`AnswerOptions.sampling` of a request to a server with a preset. `way`: as there; `names`:
    options that have the preset's values, as the request gave no others.
    """

    way: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class AnswerOptions(Sampling):
    """How an answer is generated: how its tokens are chosen, and when it ends. `detail` is how
    closely pictures are looked at; `stop` are texts before which it ends, 16 of 256 characters at
    most; `logprobs` asks for the log probability of each token, and of so many of the most probable
    ones at its place, where True is 0; `prompt_logprobs` asks for those of the prompt, which is
    read whole for them and has no pictures;
    `json_schema`, a mapping, JSON text, a Pydantic model, another type that Pydantic knows, such as
    a list of models, or True for any object, is what an answer
    that ends by itself follows. It is kept as JSON text. `grammar` is what it follows in
    another notation: {"regex": ...}, {"choice": [...]}, {"lark": ...} or {"gbnf": ...}, or a text
    in one of the last two; kept in Lark notation. `min_tokens`: none that ends the answer comes
    before; `stop_token_ids` end it as well. `continue_final_message`: the last message is the
    beginning of the answer. `tools` are functions that the model may call, as OpenAI's interface
    describes them, `tool_choice` "none", "auto", "required", or one of them; without
    `parallel_tool_calls` an answer has one call at most. The three are kept as `Toolbox`.
    `sampling`: which of the model's own settings (generation_config.json, general.sampling of a
    GGUF) hold where an option is not given: "greedy" its penalties, with the most probable token;
    "model" all of them; "off" none. Kept as `AppliedSampling` once the model is known.
    `max_tokens` -1 is the end of the context. `stop_repeating` ends an answer that says the same
    again and again (`mtmd.llm.tokenizer.repetition`).
    `think`: whether a model that can think does so before it answers, or how much: "minimal",
    "low", "medium", "high", "xhigh" or "max", where its chat template knows that; None, or "auto",
    for what the template does. `think_budget`: the most tokens of the thought, after which it is
    closed by its own mark. `chat_template_kwargs` are variables for the chat template.
    """

    max_tokens: int = 256
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    detail: str = "auto"
    logprobs: int | bool | None = None
    prompt_logprobs: int | bool | None = None
    json_schema: Mapping[str, Any] | str | bool | type[Any] | None = None
    grammar: Mapping[str, Any] | str | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any] | Tool] | Toolbox | None = None
    tool_choice: Mapping[str, Any] | str | None = None
    parallel_tool_calls: bool | None = None
    sampling: str | AppliedSampling | PresetSampling = "greedy"
    stop_repeating: bool = False
    think: bool | str | None = None
    think_budget: int | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _among("detail", self.detail, DETAILS)
        if not isinstance(self.sampling, AppliedSampling):
            given = self.sampling
            _among("sampling", given.way if isinstance(given, PresetSampling) else given, WAYS)
        for name in ("logprobs", "prompt_logprobs"):
            object.__setattr__(self, name, _logprobs(name, getattr(self, name)))
        object.__setattr__(self, "json_schema", schema_text(self.json_schema))
        super().__post_init__()
        object.__setattr__(self, "max_tokens", _max_tokens(self.max_tokens))
        object.__setattr__(
            self, "min_tokens", integer("min_tokens", self.min_tokens, 0, TOKENS_MAX)
        )
        for name in ("ignore_eos", "continue_final_message", "stop_repeating"):
            if type(getattr(self, name)) is not bool:
                refuse(name, getattr(self, name), "true or false")
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))
        object.__setattr__(self, "grammar", grammar_source(self.grammar))
        if self.grammar is not None and self.json_schema is not None:
            raise OptionError("grammar: found beside json_schema, expected one of them")
        box = read_toolbox(self.tools, self.tool_choice, self.parallel_tool_calls)
        object.__setattr__(self, "tools", box)
        if self.grammar is not None and box.callable:
            raise OptionError("grammar: found beside tools, expected one of them")
        object.__setattr__(self, "stop", _stops(self.stop))
        if self.think in ("on", "off"):  # as a command has it
            object.__setattr__(self, "think", self.think == "on")
        elif self.think == "auto":  # which a request may give in place of a preset's value
            object.__setattr__(self, "think", None)
        if self.think is not None and type(self.think) is not bool:
            _among("think", self.think, ("on", "off", "auto", *EFFORTS))
        budget = integer_or_none("think_budget", self.think_budget, 0, 1 << 20)
        object.__setattr__(self, "think_budget", budget)
        variables = checked_variables(self.chat_template_kwargs)
        object.__setattr__(self, "chat_template_kwargs", variables)

    @property
    def thinking(self) -> ThinkingRequest:
        """What is asked of thinking, and of the chat template."""
        return ThinkingRequest(self.think, self.think_budget, self.chat_template_kwargs or {})

    @property
    def toolbox(self) -> Toolbox:
        assert isinstance(self.tools, Toolbox)  # made so when this was
        return self.tools


def _max_tokens(value: object) -> int:
    """No context is longer than the largest number, which -1 becomes."""
    is_whole = type(value) is int and value == WHOLE_CONTEXT
    return TOKENS_MAX if is_whole else integer("max_tokens", value, 0, TOKENS_MAX)


def _logprobs(name: str, value: object) -> int | None:
    """True and False as in OpenAI's interface."""
    if isinstance(value, bool):
        return 0 if value else None
    return integer_or_none(name, value, 0, 20)


def _ids(value: object) -> tuple[int, ...]:
    """Ids of tokens: how many there are, the model knows."""
    if not isinstance(value, (list, tuple)) or len(value) > STOP_IDS_MAX:
        refuse("stop_token_ids", value, f"a list of at most {STOP_IDS_MAX} ids of tokens")
    return tuple(integer("stop_token_ids", item, 0, (1 << 31) - 1) for item in value)


# What holds in a conversation, and for `mtmd ask`, where nothing else is said.
CONVERSATION: dict[str, Any] = {"sampling": "model", "max_tokens": WHOLE_CONTEXT}
BESIDE: dict[Any, tuple[str, ...]] = {  # what calls that take options have beside them
    LoadOptions: ("model", "progress"),
    AnswerOptions: ("image", "prompt", "messages", "system"),
}


def data_folder() -> Path:
    """Where this user's conversations are kept, as the system has it (XDG base directories on
    Linux). Raises OptionError for a user who has no home.
    """
    try:
        return _data_folder()
    except RuntimeError as error:  # a number alone, as containers are run with
        raise OptionError(
            "found no home folder of this user, expected one; set HOME, or give --data DIR, or "
            "--no-history"
        ) from error


def _data_folder() -> Path:
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base or Path.home() / "AppData" / "Local") / "mtmd"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support" / "mtmd"
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "share") / "mtmd"


def api_keys_from_environment() -> list[str]:
    """Entries of MTMD_API_KEYS, which stand apart by commas or white space: each KEY or
    NAME:KEY.
    """
    return os.environ.get("MTMD_API_KEYS", "").replace(",", " ").split()


def notify_socket() -> str | None:
    """Where systemd listens that has started this process; a name in memory begins with a NUL."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    return f"\0{address[1:]}" if address.startswith("@") else address or None


def wants_style() -> bool:
    """Whether a terminal may be given bold and dim letters (no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def kernels_from_environment() -> str | None:
    """The folder of compiled GPU programs that MTMD_KERNELS names."""
    return os.environ.get("MTMD_KERNELS") or None


@dataclass(frozen=True)
class Launched:
    """What a launcher (torchrun) says of the processes it has started: which this is, of how many,
    and where the first one is.
    """

    rank: int
    size: int
    address: str
    port: int


def launcher(tp: int) -> Launched | None:
    """None where nobody has started several. Raises OptionError where that is not one for each of
    `tp` ranks.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = [os.environ.get(name) for name in names]
    if tp == 1 or any(v is None for v in values):
        return None
    rank, size, port = (int(v) if v and v.isdecimal() else -1 for v in (*values[:2], values[3]))
    if size != tp or not 0 <= rank < size or port < 0:
        raise OptionError(
            f"tp: found {tp}, expected {size}, as many as processes were started (WORLD_SIZE)"
        )
    return Launched(rank, size, str(values[2]), port)


def stay_on_this_machine() -> None:
    """For ranks that all are here: gloo would ask for the machine's name, which may be no address
    of it.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")


def keep_ray_quiet() -> None:
    """Before Ray is imported: it reports nothing to its makers, and leaves the GPUs that actors
    without one see as they are, which it will do by itself and warns of.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def guard_own_ray() -> None:
    """For a Ray that is started for this process alone: who does not know its token has nothing
    done by it. Without one given, Ray would leave a token of its own in the user's folder, and
    every later cluster of theirs would ask for it.
    """
    if not any(name.startswith("RAY_AUTH_") for name in os.environ):
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(32))


def tokenize_in_own_thread() -> None:
    """For a server: one text at a time gains nothing by the threads that the tokenizers library
    would start, which know nothing of priorities.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def options(kind: type[T], values: Mapping[str, Any]) -> T:
    """`kind(**values)`, with an OptionError for a name it does not have. None stands for what was
    not given, as programs have it that pass settings through.
    """
    return kind(**_known(values, kind))


def split_options(values: Mapping[str, Any]) -> tuple[LoadOptions, AnswerOptions]:
    """Options of both kinds in one dictionary, as `describe` takes them."""
    known = _known(values, LoadOptions, AnswerOptions)
    names = {f.name for f in dataclasses.fields(LoadOptions)}
    return (
        LoadOptions(**{k: v for k, v in known.items() if k in names}),
        AnswerOptions(**{k: v for k, v in known.items() if k not in names}),
    )


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are None, which is the default itself or stands for it."""
    return {name: value for name, value in values.items() if value is not None}


def _known(values: Mapping[str, Any], *kinds: Any) -> dict[str, Any]:
    names = [f.name for kind in kinds for f in dataclasses.fields(kind)]
    for name in values:
        if name not in names:
            beside = [other for kind in kinds for other in BESIDE[kind] if other != name]
            raise OptionError(f"option {name!r:.60} is not known{_advice(name, names, beside)}")
    return given(values)


def _advice(name: str, names: Sequence[str], beside: Sequence[str]) -> str:
    """What to do about an option that is not among `names`; `beside` is what else is taken by
    name.
    """
    for kind, place in ((AnswerOptions, "an answer"), (LoadOptions, "`load`")):
        if name in {f.name for f in dataclasses.fields(kind)}:
            return f" here; expected one of {', '.join(names)}: give it to {place}"
    if name in ELSEWHERE:
        return f"; {ELSEWHERE[name]}"
    names = [*beside, *names]
    return did_you_mean(str(name), names, MEANT) or f"; expected one of {', '.join(names)}"


def _speculate(value: object) -> int | str:
    """A number also as text, as a command has it."""
    if isinstance(value, str) and value in SPECULATE:
        return value
    number = int(value) if isinstance(value, str) and value.isdecimal() else value
    if type(number) is not int or not 1 <= number <= MOST_PROPOSED:
        refuse("speculate", value, f"auto, off, or a number from 1 to {MOST_PROPOSED}")
    return number


def _check_layout(chosen: LoadOptions) -> None:
    """Raises OptionError for two ways at once in which a model could lie."""
    if chosen.split == "layer" and chosen.tp > 1:
        raise OptionError("split layer: found beside tp, expected one of them")
    asked = {
        "tp": chosen.tp > 1,
        "split": chosen.split != "none",
        "tensor_split": bool(chosen.tensor_split),
        "no_kv_offload": chosen.no_kv_offload,
    }
    if chosen.fit and any(asked.values()):
        name = next(name for name, given in asked.items() if given)
        raise OptionError(f"fit: found beside {name}, which it is to choose; give one of them")


def _shares(value: object, ranks: int | None) -> tuple[float, ...]:
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


def _check_dtype(value: object) -> None:
    if str(value).removeprefix("torch.") in ("float16", "fp16", "half", "f16"):
        raise OptionError(
            f"dtype: found {value!s:.20}, expected one of {', '.join(DTYPES)}; fp16 is left out as "
            "large activations of these models overflow in it, and bf16 takes the same memory"
        )
    _among("dtype", value, DTYPES)


def _among(name: str, value: object, among: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in among:
        refuse(name, value, f"one of {', '.join(among)}")


def _text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        refuse(name, value, "a text that is not empty")


def _path_or_none(name: str, value: object) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(path, str) or not path or "\0" in path:
        refuse(name, value, "a path")
    return path


def _texts(name: str, value: object) -> tuple[str, ...]:
    """One text, or a list or tuple of them."""
    values = (value,) if isinstance(value, str) else value
    if not isinstance(values, (list, tuple)):
        refuse(name, value, "a text or a list of texts")
    for item in values:
        _text(name, item)
    return tuple(values)


def _stops(value: object) -> tuple[str, ...]:
    stops = _texts("stop", value)
    if len(stops) > STOPS_MAX:
        raise OptionError(f"stop: found {len(stops)} texts, expected at most {STOPS_MAX}")
    longest = max(map(len, stops), default=0)
    if longest > STOP_CHARS_MAX:
        raise OptionError(
            f"stop: found a text of {longest} characters, expected at most {STOP_CHARS_MAX}"
        )
    return stops
