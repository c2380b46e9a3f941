"""Describes how a checkpoint recommends to choose tokens: generation_config.json of a folder, the
keys general.sampling.* of a GGUF.

A value that makes no sense, and a setting that is not supported, refuses no model: it is left out,
and named where the model is described and in receipts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.base.text import one_line, printable
from mtmd.llm.sampling.options import DRAWING, NOTHING_RECOMMENDED, ModelSampling, Sampling

GENERATION_CONFIG = "generation_config.json"
GGUF_KEYS = "general.sampling."
MAX_NAMED = 16  # settings that are not used
LONGEST = 60  # characters of a name or a value

# By the names of transformers (GenerationConfig); vLLM reads the same, and two more of OpenAI's.
_NAMES = {
    **{name: name for name in (*DRAWING, "repetition_penalty")},
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "no_repeat_ngram_size": "no_repeat_ngram",
    "no_repeat_ngram_window_size": "no_repeat_window",
}
# By the keys of llama.cpp (LLM_KV_GENERAL_SAMPLING_*)
_GGUF_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
# Ollama's (docs/modelfile.md), and those that say how it runs the model and nothing of the text
_OLLAMA_NAMES = {
    **{name: name for name in DRAWING},
    "repeat_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
_OLLAMA_OF_NO_MATTER = {
    *("num_keep", "num_gpu", "num_thread", "num_batch", "main_gpu", "use_mmap", "use_mlock"),
    *("low_vram", "f16_kv", "numa", "vocab_only", "logits_all"),
}
_OFF: dict[str, Any] = {  # what each means where it says nothing
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "no_repeat_ngram": 0,
    "no_repeat_window": 0,
}
# Values of the other settings that ask for nothing, besides null and what is empty: transformers'
# defaults, and llama.cpp's.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "typical_p": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "encoder_repetition_penalty": (1,),
    "guidance_scale": (1,),
    "length_penalty": (1,),
    "penalty_last_n": (-1,),  # all of the text, as the penalty here counts
    "repeat_last_n": (-1,),
    "num_predict": (-1, -2),  # until the answer ends, and until the context is full
    "tfs_z": (1,),
    "max_length": (20,),  # transformers', which means that none was chosen
}
_LENGTHS = ("max_new_tokens", "max_length", "num_predict")
# Settings that say how transformers computes or what it returns, and nothing of the text.
_OF_NO_MATTER = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("transformers_version", "_from_model_config", "use_cache", "low_memory", "is_assistant"),
    *("cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "return_legacy_cache", "renormalize_logits"),
    *("compile_config", "disable_compile", "continuous_batching_config", "use_mtp"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("assistant_lookbehind", "assistant_early_exit", "assistant_ensemble_weight"),
    *("target_lookbehind", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("speculation_type", "remove_invalid_values", "token_healing"),
)
# They say something only together with another one: how mirostat and XTC work that are off.
_PART_OF = {
    "mirostat_tau": "mirostat",
    "mirostat_eta": "mirostat",
    "xtc_threshold": "xtc_probability",
    "penalty_last_n": "penalty_repeat",
    "repeat_last_n": "repeat_penalty",
}


def of_generation_config(values: Mapping[str, Any], source: str) -> ModelSampling:
    """Return what a generation_config.json, or a config.json of old that holds the same,
    recommends.

    As vLLM has it, and not transformers, a temperature is meant to be used where `do_sample` is
    missing; without a temperature, where something else says how to draw, it is 1.
    """
    unused: list[str] = []
    draws = values.get("do_sample")
    if draws is not None and type(draws) is not bool:
        unused.append(_broken("do_sample", draws, "expected true or false"))
        draws = None
    return _made(source, values, _NAMES, draws, unused, {"do_sample", *_OF_NO_MATTER})


def of_config(values: Mapping[str, Any]) -> ModelSampling:
    """Return the of config of a config.json that has no generation_config.json next to it:
    transformers takes the names that it knows from there.
    """
    names = {*_NAMES, "do_sample", *_NEUTRAL, *_LENGTHS}
    usual = {"temperature": 1, "top_k": 50}  # written by old versions for every model
    result = {n: v for n, v in values.items() if n in names and v != usual.get(n)}
    return of_generation_config(result, "config.json")


def of_gguf(metadata: Mapping[str, Any], where: str) -> ModelSampling:
    """Return what the keys general.sampling.* of the GGUF `where` recommend. Its converter leaves
    out `do_sample`, and a temperature of 1.
    """
    # Not by items(): each array that is looked up is parsed, the vocabulary too.
    result = {name: metadata[name] for name in metadata if name.startswith(GGUF_KEYS)}
    keys = {
        name.removeprefix(GGUF_KEYS): float(f"{value:.7g}") if type(value) is float else value
        for name, value in result.items()
    }  # floats of four bytes: 0.95 and not 0.949999988
    if keys.get("penalty_last_n") == 0:  # the penalty counts no token at all
        keys = {n: v for n, v in keys.items() if n not in ("penalty_repeat", "penalty_last_n")}
    return _made(f"{GGUF_KEYS}* of {where}", keys, _GGUF_NAMES, None, [], set())


def of_ollama(values: Mapping[str, Any], source: str) -> ModelSampling:
    """Return what the parameters of a model in Ollama's store recommend."""
    return _made(source, values, _OLLAMA_NAMES, None, [], _OLLAMA_OF_NO_MATTER)


def gguf_sampling(sampling: ModelSampling) -> dict[str, Any]:
    """Return the keys general.sampling.* that recommend the same."""
    return {
        GGUF_KEYS + key: sampling.values[name]
        for key, name in _GGUF_NAMES.items()
        if name in sampling.values
    }


def _made(
    source: str,
    values: Mapping[str, Any],
    names: Mapping[str, str],
    draws: bool | None,
    unused: list[str],
    skipped: set[str],
) -> ModelSampling:
    """`names`: fields of `Sampling` by the settings that hold them. `draws`: as do_sample, None
    where it is not said. `skipped`: settings that do not matter.
    """
    result = dict(_checked(values, names, unused))
    if draws is None:
        draws = result.get("temperature", 1) > 0 and not result.keys().isdisjoint(DRAWING)
    if draws:
        result.setdefault("temperature", 1.0)
    else:
        vain = [n for n in DRAWING if result.get(n)]
        if vain and result.get("temperature") != 0:
            unused.append(f"{', '.join(f'{n} {result[n]:g}' for n in vain)} (do_sample is false)")
        result = {n: v for n, v in result.items() if n not in DRAWING}
    rest = [n for n in values if n not in names and n not in skipped]
    lengths = [n for n in rest if n in _LENGTHS and not _is_neutral(n, values[n])]
    unused += _left(values, [n for n in rest if n not in _LENGTHS], result)
    if len(unused) > MAX_NAMED:
        unused[MAX_NAMED:] = [f"and {len(unused) - MAX_NAMED} more"]
    if not (result or unused or lengths):
        return NOTHING_RECOMMENDED
    return ModelSampling(
        source, result, tuple(unused), tuple(f"{n} {_short(values[n])}" for n in lengths)
    )


def _checked(
    values: Mapping[str, Any], names: Mapping[str, str], unused: list[str]
) -> Iterator[tuple[str, float]]:
    """(field, value) of each that is within its limits and not off; the others go into
    `unused`.
    """
    for setting, name in names.items():
        value = values.get(setting)
        if value is None:
            continue
        if name in ("top_k", "no_repeat_ngram", "no_repeat_window"):
            value = _as_count(value)
        try:
            checked = getattr(Sampling(**{name: value}), name)
        except OptionError as error:
            expected = str(error).rpartition(", ")[2]
            unused.append(_broken(setting, value, expected))
            continue
        if checked != _OFF.get(name):
            yield name, checked


def _as_count(value: Any) -> Any:
    """-1 is vLLM's way to say off; some files write a whole number with a point."""
    if type(value) is float and value.is_integer():
        value = int(value)
    return 0 if value == -1 else value


def _left(values: Mapping[str, Any], names: list[str], result: Mapping[str, Any]) -> Iterator[str]:
    """The settings among `names` that would change answers and are not applied."""
    for name in names:
        value = values[name]
        other = _PART_OF.get(name)
        is_part = other is not None and (
            "repetition_penalty" not in result
            if other in ("penalty_repeat", "repeat_penalty")
            else other not in names
        )
        is_off = other in values and _is_neutral(str(other), values[str(other)])
        if _is_neutral(name, value) or is_part or is_off:
            continue
        if name == "sequence" and result.keys().isdisjoint(DRAWING):
            continue
        yield f"{_shown(name)} {_short(value)} ({_REASONS.get(name, 'not supported')})"


_REASONS = {
    "penalty_last_n": "the penalty counts all of the text",
    "repeat_last_n": "the penalty counts all of the text",
    "num_ctx": "the context is chosen when a model is loaded",
    "seed": "an answer has a seed of its own unless one is given",
    "stop": "they are no special tokens; stop texts can be given with a request",
    "sequence": "the order here is temperature, top_k, top_p, min_p",
}


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a setting asks for nothing."""
    if value is None or value is False or value in ("", 0) or value in ([], {}):
        return True
    return value in _NEUTRAL.get(name, ())


def _broken(name: str, value: Any, expected: str) -> str:
    return f"{_shown(name)} {_short(value)} ({expected})"


def _shown(name: object) -> str:
    return printable(one_line(name, LONGEST))


def _short(value: Any) -> str:
    write: Callable[[Any], str] = repr if isinstance(value, str) else _json
    return printable(one_line(write(value), LONGEST))


def _json(value: Any) -> str:
    """Return JSON as the file has it, floats of four bytes without the digits that these do not
    have.
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # a number of thousands of digits
        return type(value).__name__
