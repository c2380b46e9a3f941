"""Presets as their file says them."""

from __future__ import annotations

import json

import pytest

from mtmd import OptionError
from mtmd.web.models.presets import read_presets


def read(folder, values, names=("a", "b")):
    path = folder / "presets.json"
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return read_presets(path, names)


def test_what_holds_for_all_and_what_for_one(tmp_path):
    result = read(
        tmp_path,
        {
            "*": {"temperature": 0.2, "load": {"context": 512}},
            "a": {
                "system": "Be brief.",
                "temperature": 0,
                "aliases": ["gpt-4o"],
                "load": {"mmproj": "p.gguf"},
            },
        },
    )
    assert result["a"].system == "Be brief." and result["a"].answer == {"temperature": 0}
    assert result["a"].load == {"context": 512, "mmproj": str(tmp_path / "p.gguf")}
    assert result["a"].aliases == ("gpt-4o",)
    assert result["b"].answer == {"temperature": 0.2} and result["b"].system == ""


@pytest.mark.parametrize(
    "values, reported",
    [
        ("{", "found no JSON"),
        ("[]", "expected an object by model"),
        ({"c": {}}, "there is no model 'c'"),
        ({"a": {"temprature": 1}}, "did you mean 'temperature'"),
        ({"a": {"temperature": -1}}, "temperature"),
        ({"a": {"load": {"device": "cpu"}}}, "'device' is not known here"),
        ({"a": {"load": {"context": 1}}}, "context"),
        ({"a": {"system": 1}}, "system: expected a text"),
        ({"a": {"aliases": "x"}}, "aliases: expected a list"),
        ({"a": {"aliases": ["b"]}}, "alias 'b' is the name of another model"),
        ({"*": {"aliases": ["x"]}}, "belong to one model"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path, values, reported):
    with pytest.raises(OptionError) as error:
        read(tmp_path, values)
    assert reported in str(error.value) and "presets.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(OptionError, match="cannot be read"):
        read_presets(tmp_path / "none.json", ["a"])


def test_adapters_lie_beside_the_file(tmp_path):
    (tmp_path / "style").mkdir()
    result = read(tmp_path, {"a": {"load": {"lora": {"s": "style", "t": "org/name"}}}})
    assert result["a"].load["lora"] == (f"s={tmp_path / 'style'}:1.000000", "t=org/name")
    with pytest.raises(OptionError, match=r"presets\.json, a, load: lora: "):
        read(tmp_path, {"a": {"load": {"lora": 3}}})
