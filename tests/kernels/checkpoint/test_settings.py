"""Values of JSON files: what is taken, and that everything else is told in one line with its
place.
"""

from __future__ import annotations

import json
import math

import pytest

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.settings import MAX_BYTES, MAX_COUNT, Settings, read_json

HUGE = 10**400


def settings(**values: object) -> Settings:
    return Settings(values, "config.json")


def refused(match: str):
    return pytest.raises(ModelError, match=match)


@pytest.mark.parametrize("value", [1, 256, MAX_COUNT])
def test_counts(value):
    assert settings(n=value).count("n") == value


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "3", [3], MAX_COUNT + 1, HUGE, math.nan, {}])
def test_what_is_no_count(value):
    with refused(rf"config.json: n is .*, expected an integer from 1 to {MAX_COUNT}"):
        settings(n=value).count("n")


def test_a_count_may_have_a_limit_of_its_own():
    assert settings(n=12).count("n", maximum=12) == 12
    with refused("config.json: n is 13, expected an integer from 1 to 12"):
        settings(n=13).count("n", maximum=12)


@pytest.mark.parametrize("value", [0, 5, MAX_COUNT - 1])
def test_ids_of_tokens(value):
    assert settings(t=value).token_id("t", 1) == value
    assert settings(t=value).token_ids("t") == [value]
    assert settings(t=[7, value]).token_ids("t") == [7, value]
    assert settings(t=None).token_id("t", 1) == 1
    assert settings().token_ids("t") == []


@pytest.mark.parametrize("value", [-1, 1.0, True, "3", MAX_COUNT, HUGE, math.nan, {}])
def test_what_is_no_id_of_a_token(value):
    """Libraries take ids as integers of the machine: larger ones would raise OverflowError."""
    with refused(rf"config.json: t is .*, expected a token's id, from 0 to {MAX_COUNT - 1}"):
        settings(t=value).token_id("t", 1)
    for ids in (value, [value], [3, value], []):
        with refused(r"config.json: t is .*, expected a token's id or a list of ids, each from 0"):
            settings(t=ids).token_ids("t")


@pytest.mark.parametrize("value", [1, 1e-6, 10000.0, 2**53])
def test_numbers(value):
    result = settings(x=value).number("x")
    assert result == value and type(result) is float


@pytest.mark.parametrize("value", [0, -1e-6, math.inf, math.nan, True, "1", None, HUGE, -HUGE, [1]])
def test_what_is_no_number(value):
    with refused(r"config.json: x is .*, expected a number above 0"):
        settings(x=value).number("x")


def test_several_numbers():
    assert settings(mean=[0.5, 0, -1]).numbers("mean", 3, ()) == (0.5, 0.0, -1.0)
    assert settings().numbers("mean", 2, (0.5, 0.5)) == (0.5, 0.5)
    for value in (
        [0.5, 0.5],
        [0.5, 0.5, "x"],
        [0.5, 0.5, math.inf],
        [1, 1, HUGE],
        [1, 1, True],
        3,
        "abc",
        {"a": 1},
    ):
        with refused("config.json: mean is .*, expected 3 numbers"):
            settings(mean=value).numbers("mean", 3, (0.5,) * 3)


def test_flags_are_booleans():
    assert (
        settings(a=True).flag("a", False)
        and not settings(a=False).flag("a", True)
        and settings().flag("a", True)
    )
    for value in (1, 0, "true", []):
        with refused("config.json: a is .*, expected true or false"):
            settings(a=value).flag("a", False)


def test_choices():
    assert settings(act="gelu").choice("act", ("gelu", "silu"), "silu") == "gelu"
    assert settings(act=None).choice("act", {"gelu": 1, "silu": 2}, "silu") == "silu"
    for value in ("relu", ["gelu"], {}, 3):
        with refused("config.json: act is .*, expected one of gelu, silu"):
            settings(act=value).choice("act", ("gelu", "silu"), "silu")
    for value in (True, 1.0, "1"):  # equal to 1, and yet something else was meant
        with refused("expected one of 0, 1"):
            settings(resample=value).choice("resample", (0, 1), 0)


def test_null_counts_as_absent():
    result = settings(n=None, part=None)
    assert (
        result.get("n", 7) == 7 and result.count("n", 3) == 3 and result.part("part").values == {}
    )
    with refused("config.json: n is None, expected an integer"):
        result.count("n")


def test_errors_say_where_a_part_lies():
    with refused("config.json: vision_config: size is 'x', expected an integer"):
        settings(vision_config={"size": "x"}).part("vision_config").count("size")
    for value in ([1], "x", 3):
        with refused("config.json: vision_config: found .*, expected an object"):
            settings(vision_config=value).part("vision_config")


def test_long_values_are_cut_short():
    with refused("expected an integer") as reported:
        settings(n="x" * 10_000).count("n")
    assert len(str(reported.value)) < 200


def test_a_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"a": [1, "ü"]}), encoding="utf-8")
    assert read_json(tmp_path / "config.json") == {"a": [1, "ü"]}


def test_a_missing_file(tmp_path):
    assert read_json(tmp_path / "config.json", required=False) == {}
    with refused(r"config\.json is missing; expected a checkpoint folder"):
        read_json(tmp_path / "config.json")
    (tmp_path / "folder.json").mkdir()
    with refused(r"folder\.json is missing"):
        read_json(tmp_path / "folder.json")


@pytest.mark.parametrize(
    "content, reported",
    [
        (b"", "not valid JSON at line 1"),
        (b'{"a": 1,\n}', "not valid JSON at line 2"),
        (b"\xff\xfe{}\xd8", "not valid JSON"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[1]", "found a JSON list, expected an object"),
        (b"null", "found a JSON NoneType, expected an object"),
        (b" " * (MAX_BYTES + 1), f"{MAX_BYTES + 1} bytes, expected at most {MAX_BYTES}"),
    ],
    ids=["empty", "broken", "not utf-8", "deep", "long number", "list", "null", "large"],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, content, reported):
    (tmp_path / "config.json").write_bytes(content)
    with refused(reported) as error:
        read_json(tmp_path / "config.json")
    assert "config.json" in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    path.write_text("{}")

    def refuse(self: object) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(type(path), "read_bytes", refuse)
    with refused(r"config\.json cannot be read \(Permission denied\)"):
        read_json(path)
