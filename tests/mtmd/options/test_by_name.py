"""Options: what is taken, what is refused, and that a refusal says what was found and expected."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal

import numpy as np
import pytest
import torch
from pydantic import BaseModel, TypeAdapter

from mtmd.base.errors import OptionError
from mtmd.llm.sampling.options import Sampling
from mtmd.options.answer import AnswerOptions
from mtmd.options.by_name import options, split_options
from mtmd.options.load import LoadOptions

GOOD: list[tuple[type, dict[str, Any]]] = [
    (AnswerOptions, {}),
    (LoadOptions, {}),
    (
        AnswerOptions,
        {
            "max_tokens": 1,
            "temperature": 0,
            "top_k": 0,
            "top_p": 1,
            "min_p": 0,
            "repetition_penalty": 1,
            "seed": None,
        },
    ),
    (
        AnswerOptions,
        {
            "max_tokens": 1 << 20,
            "temperature": 100,
            "top_p": 0.5,
            "min_p": 1.0,
            "repetition_penalty": 0.01,
            "seed": 2**63 - 1,
        },
    ),
    (AnswerOptions, {"stop": ["a", "\n"], "ignore_eos": True}),
    (
        LoadOptions,
        {"device": "cuda:3", "dtype": "bf16", "flash_attn": "off", "threads": 1, "context": 16},
    ),
    (LoadOptions, {"speculate": 32}),
    (LoadOptions, {"speculate": "off"}),
    (LoadOptions, {"threads": None, "context": None, "override_tensor": [], "refuse": ()}),
]
BAD: list[tuple[str, Any, str]] = [
    ("max_tokens", -2, "integer from 0"),
    ("max_tokens", -3, "integer from 0"),
    ("max_tokens", 2.0, "integer"),
    ("max_tokens", "5", "integer"),
    ("max_tokens", True, "integer"),
    ("max_tokens", 10**400, "1048576"),
    ("temperature", math.nan, "from 0 (greedy) to 100"),
    ("temperature", -1, "number from 0"),
    ("temperature", -1e-6, "number from 0"),
    ("temperature", True, "number"),
    ("temperature", math.inf, "number"),
    ("temperature", "1", "number"),
    ("temperature", 10**400, "number"),
    ("top_k", -1, "integer from 0"),
    ("top_k", 1.5, "integer"),
    ("top_k", np.float64(3), "integer"),
    ("top_p", 2, "from 0"),
    ("frequency_penalty", 2.1, "number"),
    ("presence_penalty", -3, "number"),
    ("logit_bias", {"x": 1}, "integer"),
    ("logit_bias", {3: 101}, "number"),
    ("logit_bias", 3, "biases"),
    ("min_tokens", -1, "integer from 0"),
    ("stop_token_ids", [-1], "integer from 0"),
    ("continue_final_message", 1, "true or false"),
    ("grammar", 3, "a text, or one of regex"),
    ("tool_choice", "sometimes", "none, auto, required"),
    ("tools", 3, "a list of tools"),
    ("top_p", -0.1, "number"),
    ("min_p", np.bool_(True), "number"),
    ("min_p", 1.01, "number from 0 to 1"),
    ("min_p", math.nan, "number"),
    ("repetition_penalty", 0, "number from 0.01"),
    ("seed", -1, "integer from 0"),
    ("seed", 2**63, "9223372036854775807"),
    ("seed", "x", "integer"),
    ("ignore_eos", 1, "true or false"),
    ("ignore_eos", "no", "true or false"),
    ("stop", "", "not empty"),
    ("stop", ["a", ""], "not empty"),
    ("stop", 5, "list of texts"),
    ("stop", "x" * 257, "at most 256"),
    ("stop", ["x"] * 17, "at most 16"),
    ("stop", [b"x"], "a text"),
    ("stop", {"a": 1}, "list of texts"),
    ("dtype", "int3", "auto, bf16, fp32"),
    ("dtype", ["bf16"], "auto"),
    ("dtype", np.zeros(3), "auto"),
    ("flash_attn", "maybe", "auto, on, off"),
    ("vision_attention", "cudnn", "auto, triton, torch"),
    ("preprocess", "device", "auto, host"),
    ("speculate", "on", "auto, off, or a number from 1 to 32"),
    ("speculate", 0, "auto, off, or a number from 1 to 32"),
    ("speculate", "33", "auto, off, or a number from 1 to 32"),
    ("speculate", True, "auto, off, or a number from 1 to 32"),
    ("speculate", 2.0, "auto, off, or a number from 1 to 32"),
    ("flash_attn", True, "auto, on, off"),
    ("device", "", "not empty"),
    ("device", 0, "a text"),
    ("override_tensor", 3, "list of texts"),
    ("override_tensor", [None], "a text"),
    ("refuse", 3, "list of texts"),
    ("refuse", [""], "not empty"),
    ("threads", 0, "integer from 1"),
    ("threads", 10**6, "1024"),
    ("threads", 1.0, "integer"),
    ("context", 15, "integer from 16"),
    ("context", -1, "integer"),
    ("context", "8k", "integer"),
]


@pytest.mark.parametrize(("kind", "values"), GOOD, ids=str)
def test_taken(kind: type, values: dict[str, Any]) -> None:
    made = options(kind, values)
    for name, value in values.items():
        assert getattr(made, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("kind", [LoadOptions, AnswerOptions])
def test_none_is_what_was_not_given(kind: type) -> None:
    assert options(kind, {f.name: None for f in dataclasses.fields(kind)}) == kind()


def test_none_is_not_given_to_both_kinds_at_once() -> None:
    none = {f.name: None for kind in (LoadOptions, AnswerOptions) for f in dataclasses.fields(kind)}
    assert split_options(none) == (LoadOptions(), AnswerOptions())
    with pytest.raises(OptionError, match="'colour' is not known"):
        options(AnswerOptions, {"colour": None})


@pytest.mark.parametrize(
    ("given", "saved"), [(True, 0), (False, None), (0, 0), (3, 3), (None, None)]
)
def test_logprobs_may_be_said_as_in_openais_interface(given: Any, saved: int | None) -> None:
    result = AnswerOptions(logprobs=given).logprobs
    assert result == saved and type(result) is type(saved)


def test_a_number_to_propose_may_be_text_as_on_a_command_line() -> None:
    assert LoadOptions(speculate="7").speculate == 7


@pytest.mark.parametrize(("name", "value", "expected"), BAD, ids=lambda v: str(v)[:24])
def test_refused_with_found_and_expected(name: str, value: Any, expected: str) -> None:
    with pytest.raises(OptionError) as caught:
        split_options({name: value})
    message = str(caught.value)
    assert (
        message.startswith(f"{name}: found ")
        and "expected" in message
        and expected in message.split("expected", 1)[1]
    )
    assert message.isprintable() and len(message) < 250


@pytest.mark.parametrize(
    ("value", "meant"), [("24", "24GiB"), ("0.5", "0.5GiB"), ("8192", "8192MiB")]
)
def test_a_size_that_is_too_small_for_bytes_wants_a_unit(value: str, meant: str) -> None:
    with pytest.raises(
        OptionError, match=rf"memory_limit: found {value}, .*did you mean {meant}\?"
    ):
        options(LoadOptions, {"memory_limit": value})


@pytest.mark.parametrize(("value", "count"), [("1048576", 1 << 20), ("24B", 24), (24, 24)])
def test_bytes_that_are_meant_are_taken(value: Any, count: int) -> None:
    assert options(LoadOptions, {"memory_limit": value}).memory_limit == count


@pytest.mark.parametrize("kind", [LoadOptions, AnswerOptions])
def test_an_unknown_option_is_told_with_those_there_are(kind: type) -> None:
    with pytest.raises(
        OptionError, match=r"option 'colour' is not known; expected one of \w+(, \w+)+$"
    ):
        options(kind, {"colour": 3})


def test_options_of_the_other_kind_are_unknown() -> None:
    with pytest.raises(OptionError, match="option 'dtype' is not known"):
        options(AnswerOptions, {"dtype": "fp32"})


def test_split() -> None:
    load, answer = split_options(
        {"dtype": "fp32", "max_tokens": 3, "override_tensor": "a=cpu", "stop": "x"}
    )
    assert load == LoadOptions(dtype="fp32", override_tensor=("a=cpu",))
    assert answer == AnswerOptions(max_tokens=3, stop=("x",))
    with pytest.raises(OptionError, match=r"'colour' is not known.*device.*max_tokens"):
        split_options({"colour": 1})


def test_a_number_too_long_to_print() -> None:
    for name in ("max_tokens", "temperature", "seed"):
        with pytest.raises(OptionError, match=f"{name}: found a huge int, expected"):
            split_options({name: 10**5000})


def test_numpy_scalars_are_the_numbers_they_hold() -> None:
    result = AnswerOptions(
        max_tokens=np.int64(3),
        temperature=np.float64(0.5),
        top_k=np.int32(4),
        top_p=np.float32(0.5),
        min_p=np.float16(0.25),
        repetition_penalty=np.float64(1.5),
        seed=np.uint8(7),
    )
    assert result == AnswerOptions(
        max_tokens=3,
        temperature=0.5,
        top_k=4,
        top_p=0.5,
        min_p=0.25,
        repetition_penalty=1.5,
        seed=7,
    )
    assert {type(v) for v in (result.max_tokens, result.top_k, result.seed)} == {int}, (
        "as JSON takes them"
    )
    assert {
        type(v) for v in (result.temperature, result.top_p, result.min_p, result.repetition_penalty)
    } == {float}
    assert LoadOptions(threads=np.int64(2), context=np.int16(64)) == LoadOptions(
        threads=2, context=64
    )


SAMPLING = {
    "temperature": [0, 1e-6, 1e-5, 100, 101, -1, math.inf, math.nan, True, "1"],
    "top_k": [0, 1 << 25, 1 << 31, -1, 1.0],
    "top_p": [0, 1e-9, 1, 1.1],
    "min_p": [0, 1, 1.1],
    "repetition_penalty": [0.01, 100, 0, 101],
    "seed": [None, 0, 1 << 63, -1],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in SAMPLING.items() for value in values],
    ids=str,
)
def test_what_the_sampler_takes_is_what_an_answer_takes(name: str, value: Any) -> None:
    reported = []
    for kind in (AnswerOptions, Sampling):
        try:
            reported.append(getattr(kind(**{name: value}), name))
        except OptionError as error:
            reported.append(str(error))
    assert reported[0] == reported[1]


@pytest.mark.parametrize("tiny", [1e-300, 1e-8, 9.9e-6])
def test_temperatures_that_clients_send_for_none_are_none(tiny: float) -> None:
    assert AnswerOptions(temperature=tiny).temperature == 0
    assert Sampling(temperature=tiny).temperature == 0
    assert AnswerOptions(temperature=1e-5).temperature == 1e-5


def test_options_can_be_keys() -> None:
    assert (
        len({LoadOptions(refuse=["a"]), LoadOptions(refuse=("a",)), LoadOptions(refuse="a")}) == 1
    )


@pytest.mark.parametrize(
    ("name", "reported"),
    [("stream", r"load\(\)\.stream\(image, prompt\)"), ("do_sample", "temperature")],
)
def test_options_of_other_libraries_are_told_what_takes_their_place(
    name: str, reported: str
) -> None:
    with pytest.raises(OptionError, match=f"option '{name}' is not known; .*{reported}"):
        split_options({name: True})


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (AnswerOptions, "images", "image"),
        (AnswerOptions, "message", "messages"),
        (AnswerOptions, "sytem", "system"),
        (LoadOptions, "progess", "progress"),
        (LoadOptions, "n_ctx", "context"),
        (AnswerOptions, "num_predict", "max_tokens"),
    ],
    ids=str,
)
def test_what_stands_beside_options_may_have_been_meant(kind: type, name: str, meant: str) -> None:
    with pytest.raises(OptionError, match=f"'{name}' is not known; did you mean '{meant}'"):
        options(kind, {name: 1})


def test_devices_and_number_types_may_be_torchs_own() -> None:
    assert LoadOptions(device=torch.device("cuda", 1)).device == "cuda:1"  # type: ignore[arg-type]
    for given, meant in [("bfloat16", "bf16"), (torch.float32, "fp32"), (torch.bfloat16, "bf16")]:
        assert LoadOptions(dtype=given).dtype == meant
    with pytest.raises(OptionError, match=r"dtype: found torch\.float16, expected one of auto"):
        LoadOptions(dtype=torch.float16)  # type: ignore[arg-type]


def test_a_pydantic_model_is_its_schema() -> None:
    class Count(BaseModel):
        number: int

    text = AnswerOptions(json_schema=Count).json_schema
    assert json.loads(str(text)) == Count.model_json_schema()


def test_types_that_pydantic_knows_are_schemas() -> None:
    class Count(BaseModel):
        number: int

    @dataclasses.dataclass
    class Result:
        name: str

    class Colour(Enum):
        RED = "red"

    kinds: list[Any] = [list[Count], Result, Colour, Literal["a", "b"], Count | None, int]
    for kind in kinds:
        expected = TypeAdapter(kind).json_schema()
        for given in (kind, TypeAdapter(kind)):
            assert json.loads(str(AnswerOptions(json_schema=given).json_schema)) == expected
    with pytest.raises(OptionError, match="an object of the class Count, expected the class it"):
        AnswerOptions(json_schema=Count(number=1))  # type: ignore[arg-type]


def test_a_schema_may_stand_in_what_openais_interface_has_around_it() -> None:
    schema = {"type": "boolean"}
    named = {"name": "x", "strict": True, "schema": schema}
    for given in (named, {"type": "json_schema", "json_schema": named}, json.dumps(named)):
        assert json.loads(str(AnswerOptions(json_schema=given).json_schema)) == schema
    own = {"type": "object", "properties": {"schema": schema}}
    assert json.loads(str(AnswerOptions(json_schema=own).json_schema)) == own


def test_a_class_that_is_no_schema() -> None:
    class Plain:
        pass

    class Unfit(BaseModel):
        call: Callable[[], int]

    reported = {
        Plain: "found the class Plain, expected a Pydantic model, or a type that Pydantic knows, or a",
        Unfit: "found the class Unfit, of which no schema can be made",
    }
    for kind, words in reported.items():
        with pytest.raises(OptionError, match=f"json_schema: {words}"):
            AnswerOptions(json_schema=kind)


@pytest.mark.parametrize("value", ["float16", "fp16", "torch.float16", torch.float16], ids=str)
def test_half_precision_is_refused_with_the_reason(value: Any) -> None:
    with pytest.raises(OptionError, match="expected one of auto, bf16, fp32; fp16 is left out as"):
        LoadOptions(dtype=value)
    with pytest.raises(
        OptionError, match="option 'torch_dtype' is not known; did you mean 'dtype'"
    ):
        options(LoadOptions, {"torch_dtype": "bfloat16"})
