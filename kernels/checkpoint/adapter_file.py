"""LoRA adapters (arXiv:2106.09685) as they are published: folders of PEFT, and the GGUF files of
llama.cpp's convert_lora_to_gguf.py. Which weights one changes, by the names in its file, is known
from headers alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.base.spelling import did_you_mean_path
from mtmd.kernels.checkpoint.canonical import PLAIN, WeightFile
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.magic import ADAPTER_CONFIG, ADAPTER_WEIGHTS, is_gguf
from mtmd.kernels.checkpoint.open_weights import open_weights
from mtmd.kernels.checkpoint.settings import Settings, read_json
from mtmd.kernels.dtype import name_of

MAX_RANK = 4096
MAX_PATTERN, MAX_PATTERNS = 500, 4096  # characters of rank_pattern's keys, and their number
_PEFT = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_"
    r"(?:(?P<matrix>[AB])\.weight|embedding_(?P<table>[AB])|(?P<magnitude>magnitude_vector)(?:\.weight)?)"
)
_NESTED = ".base_layer"
_MODULE, _COPY = re.compile(r"^base_model\.model\."), ".base_layer.weight"
_GGUF = re.compile(r"(?P<weight>.+)\.lora_(?P<matrix>[ab])")
# Settings of PEFT that say what else an adapter computes, and the value with which it does not.
_PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
}
# Of `init_lora_weights`: those that change the base model's weights, too.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Change:
    """Describes what an adapter adds to one weight [N, K], scale * b @ a, by the names of a [R, K]
    and b [N, R]. `embedding`: it is a table [V, D], of which a is [V, R], or [R, V] in PEFT's
    files, and b [D, R]. `magnitude`: lengths of the sum's rows, of DoRA (arXiv:2402.09353).
    `among`: it is that of a table of E experts [E, N, K], one of those called so, and R is as much
    for each of them.
    """

    a: str
    b: str
    rank: int
    shape: tuple[int, int]
    scale: float
    embedding: bool = False
    magnitude: str | None = None
    among: tuple[str, ...] = ()


@dataclass(frozen=True)
class AdapterFile:
    """`changes` by the name of the weight in a checkpoint, or in a GGUF where the file is one.
    `base` is the model that it says it was made for, `architecture` that of a GGUF; "" where it
    does not say.
    """

    path: Path
    file: WeightFile
    changes: Mapping[str, Change]
    base: str = ""
    architecture: str = ""

    @property
    def where(self) -> str:
        return f"adapter {self.path}"


def open_adapter(path: Path) -> AdapterFile:
    """A folder of PEFT, its weights, or a GGUF file. Raises ModelError; no values are read."""
    if path.is_dir() and not (path / ADAPTER_CONFIG).exists():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ModelError(
                f"adapter {path}: found no {ADAPTER_CONFIG} in it, expected the folder of a LoRA "
                "adapter that PEFT has saved, or a GGUF file of one"
            )
        path = files[0]
    if path.is_dir():
        return _open_peft(path)
    if not path.exists():
        raise ModelError(
            f"adapter {path}: found no such file or folder, expected the folder of a LoRA adapter "
            "that PEFT has saved, a GGUF file of one, or org/name on the Hugging Face "
            f"hub{did_you_mean_path(path)}"
        )
    if path.name == ADAPTER_WEIGHTS:
        return _open_peft(path.parent)
    if is_gguf(path):
        return _open_gguf(path)
    open_weights(path)  # says what a pickle is
    raise ModelError(
        f"adapter {path} is a file of weights; expected its folder, with {ADAPTER_CONFIG}, or a "
        "GGUF file"
    )


def _open_peft(folder: Path) -> AdapterFile:
    where = f"adapter {folder}"
    config = Settings(read_json(folder / ADAPTER_CONFIG), f"{where}: {ADAPTER_CONFIG}")
    _check_settings(config)
    if not (folder / ADAPTER_WEIGHTS).exists():
        pickles = sorted(p.name for p in folder.glob("adapter_model.*"))
        value = f"{pickles[0]}, a pickle, which can run code when loaded" if pickles else "none"
        raise ModelError(
            f"{where} has no {ADAPTER_WEIGHTS} (found {value}); save it with PEFT's "
            "save_pretrained(folder), which writes safetensors"
        )
    file = open_weights(folder / ADAPTER_WEIGHTS)
    parts: dict[str, dict[str, str]] = {}
    copies = {}
    for name in file.names():
        if name.endswith(_COPY):  # of a table: PEFT saves it with an adapter of one
            copies[_MODULE.sub("", name.removesuffix(_COPY))] = file.meta(name)[0]
            continue
        match = _PEFT.fullmatch(name)
        if match is None:
            raise ModelError(
                f"{where}: tensor {name!r:.120} is neither lora_A nor lora_B of a module; biases, "
                "modules_to_save and trained tokens are not read: merge the adapter into its "
                "model with PEFT's merge_and_unload()"
            )
        part = match["matrix"] or (match["table"] and f"table {match['table']}") or "magnitude"
        parts.setdefault(match["module"], {})[part] = name
    scales, targets = _Scales(config), _texts(config, "target_parameters")
    changes = {}
    for module, names in parts.items():
        embedding = "table A" in names
        keys = ("table A", "table B") if embedding else ("A", "B")
        a, b = _both(where, module, *(names.get(key) for key in keys))
        (r, k), (n, r_too) = _matrix(where, file, a), _matrix(where, file, b)
        shape = (k, n) if embedding else (n, k)
        end = len(module)
        while module.endswith(_NESTED, 0, end):
            end -= len(_NESTED)
        owner = module[:end]
        if among := _experts(owner, targets):
            rank = scales.rank(owner)
            _rank(where, module, r, r_too, max(r // rank, 1) * rank)
            scale = scales.scale(owner, rank)
            changes[module] = Change(a, b, r, shape, scale, among=among)
            continue
        rank = _rank(where, module, r, r_too, scales.rank(module))
        changes[f"{module}.weight"] = Change(
            a, b, rank, shape, scales.scale(module, rank), embedding, names.get("magnitude")
        )
        magnitude = names.get("magnitude")
        if (magnitude is not None) != config.flag("use_dora", False):
            raise ModelError(
                f"{where}: {module} has {'a' if magnitude else 'no'} magnitude vector, but "
                f"use_dora is {config.flag('use_dora', False)}; the two belong to different "
                "adapters, fetch both again"
            )
        if magnitude is not None and (embedding or _matrix_size(file, magnitude) != n):
            raise ModelError(
                f"{where}: tensor {magnitude} has shape {list(file.meta(magnitude)[0])}, expected "
                f"[{n}] of a linear layer"
            )
    for module, size in copies.items():
        change = changes.get(f"{module}.weight")
        if change is None or change.shape != size:
            raise ModelError(
                f"{where} has a table {module:.120} of shape {list(size)} of its own, which is not "
                "read: merge the adapter into its model with PEFT's merge_and_unload()"
            )
    if config.get("ensure_weight_tying", False) and any(c.embedding for c in changes.values()):
        raise ModelError(
            f"{config.where}: ensure_weight_tying is true, with which the table of tokens changes "
            "the outputs, too; merge the adapter into its model with PEFT's merge_and_unload()"
        )
    return _checked(
        AdapterFile(folder, file, changes, str(config.get("base_model_name_or_path", "") or ""))
    )


def _texts(config: Settings, key: str) -> list[str]:
    value: object = config.get(key, [])
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"{config.where}: {key} is {value!r:.60}, expected a list of names")
    return value


def _experts(module: str, targets: list[str]) -> tuple[str, ...]:
    """Return the parameters of a module that an adapter changes as such. Which matrices are whose,
    PEFT says by how wrappers are nested; here their shapes say it.
    """
    names = (f"{module}.{target.rpartition('.')[2]}" for target in targets)
    pairs = zip(names, targets, strict=True)
    ends = (name for name, target in pairs if name == target or name.endswith(f".{target}"))
    return tuple(name for name in ends if not name.endswith(".weight"))


def _check_settings(config: Settings) -> None:
    """Raises ModelError for what an adapter does beside adding low-rank products."""
    for key, values in _PLAIN_SETTINGS.items():
        value = config.values.get(key, values[0])
        if not any(type(value) is type(v) and value == v for v in values):
            raise ModelError(
                f"{config.where}: {key} is {value!r:.60}, expected {values[0]!r}; merge the "
                "adapter into its model with PEFT's merge_and_unload()"
            )
    way = config.get("init_lora_weights", True)
    if isinstance(way, str) and way.lower().startswith(_CHANGE_THE_BASE):
        raise ModelError(
            f"{config.where}: init_lora_weights is {way!r:.40}, with which training has changed "
            "the base model, too; convert the adapter with PEFT's save_pretrained(..., "
            "path_initial_model_for_weight_conversion=...)"
        )


class _Scales:
    """Ranks and scales of modules, by lora_alpha, rank_pattern, alpha_pattern and use_rslora."""

    def __init__(self, config: Settings) -> None:
        self._r = config.count("r", 8, maximum=MAX_RANK)
        self._alpha = _number(config, "lora_alpha", config.get("lora_alpha", 8))
        self._by_root = config.flag("use_rslora", False)
        self._ranks, self._alphas = (
            _patterns(config.part(key)) for key in ("rank_pattern", "alpha_pattern")
        )

    def rank(self, module: str) -> int:
        value = _matching(self._ranks, module, self._r)
        return int(value)

    def scale(self, module: str, rank: int) -> float:
        alpha = _matching(self._alphas, module, self._alpha)
        return alpha / (math.sqrt(rank) if self._by_root else rank)


def _number(config: Settings, key: str, value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= 1e9:
        raise ModelError(f"{config.where}: {key} is {value!r:.40}, expected a number")
    return float(value)


def _patterns(patterns: Settings) -> list[tuple[str, bool, float]]:
    """Names of modules, whether they are whole or may be the end of one, and a value for each: what
    PEFT's regular expressions mean where they are plain names. Others are refused, since files may
    hold ones that never end.
    """
    if len(patterns.values) > MAX_PATTERNS:
        raise ModelError(f"{patterns.where}: found {len(patterns.values)} patterns")
    result = []
    for text, value in patterns.values.items():
        plain = text.removeprefix("^").removesuffix("$").replace(r"\.", ".")
        if len(text) > MAX_PATTERN or not re.fullmatch(r"[\w.]+", plain, re.ASCII):
            raise ModelError(
                f"{patterns.where}: {text!r:.60} is no name of a module; expected names such as "
                "model.layers.0.self_attn.q_proj"
            )
        result.append((plain, text.startswith("^"), _number(patterns, text, value)))
    return result


def _matching(patterns: list[tuple[str, bool, float]], module: str, default: float) -> float:
    return next(
        (
            value
            for name, whole, value in patterns
            if module == name or (not whole and module.endswith(f".{name}"))
        ),
        default,
    )


def _open_gguf(path: Path) -> AdapterFile:
    file, where = GgufFile(path), f"adapter {path}"
    keys = file.metadata
    kind, way = keys.get("general.type"), keys.get("adapter.type")
    if kind != "adapter" or way != "lora":
        raise ModelError(
            f"{where} is a GGUF of general.type {kind!r:.40} and adapter.type {way!r:.40}, "
            "expected a LoRA adapter, as convert_lora_to_gguf.py writes it"
        )
    alpha: Any = keys.get("adapter.lora.alpha", 0.0)
    if type(alpha) not in (int, float) or not abs(alpha) <= 1e9:
        raise ModelError(f"{where}: adapter.lora.alpha is {alpha!r:.40}, expected a number")
    parts: dict[str, dict[str, str]] = {}
    for name in file.names():
        match = _GGUF.fullmatch(name)
        if match is None:
            raise ModelError(f"{where}: tensor {name!r:.120} is neither lora_a nor lora_b")
        parts.setdefault(match["weight"], {})[match["matrix"]] = name
    changes = {}
    for weight, names in parts.items():
        a, b = _both(where, weight, names.get("a"), names.get("b"))
        embedding = weight == "token_embd.weight"  # there a lies the other way round
        first, (n, r_too) = _matrix(where, file, a), _matrix(where, file, b)
        k, r = first if embedding else first[::-1]
        rank = _rank(where, weight, r, r_too, r)
        shape = (k, n) if embedding else (n, k)
        scale = alpha / rank if alpha else 1.0  # as llama.cpp has it
        changes[weight] = Change(a, b, rank, shape, scale, embedding)
    architecture = str(keys.get("general.architecture", ""))
    return _checked(AdapterFile(path, file, changes, "", architecture))


def _checked(adapter: AdapterFile) -> AdapterFile:
    if not adapter.changes:
        raise ModelError(f"{adapter.where} has no tensors; fetch it again")
    return adapter


def _both(where: str, weight: str, a: str | None, b: str | None) -> tuple[str, str]:
    if a is None or b is None:
        raise ModelError(
            f"{where}: {weight:.120} has one of its two matrices, expected both; fetch it again"
        )
    return a, b


def _matrix(where: str, file: WeightFile, name: str) -> tuple[int, int]:
    shape, dtype = file.meta(name)
    if dtype not in PLAIN:
        raise ModelError(
            f"{where}: tensor {name:.120} is {file.kind(name)} ({name_of(dtype)}), expected "
            f"{', '.join(map(name_of, PLAIN))}"
        )
    if len(shape) != 2 or 0 in shape:
        raise ModelError(
            f"{where}: tensor {name:.120} has shape {list(shape)}, expected the matrix of a linear "
            "layer or a table"
        )
    return shape[0], shape[1]


def _matrix_size(file: WeightFile, name: str) -> int:
    return math.prod(file.meta(name)[0])


def _rank(where: str, weight: str, a: int, b: int, expected: int) -> int:
    if a != b or a != expected or a > MAX_RANK:
        raise ModelError(
            f"{where}: {weight:.120} has matrices of ranks {a} and {b}, expected "
            f"{min(expected, MAX_RANK)} of both; fetch it again"
        )
    return a
