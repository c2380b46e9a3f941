from __future__ import annotations

import json
import random

import pytest

from mtmd.web.errors import ApiError
from mtmd.web.intake import json_limits
from mtmd.web.intake.json_limits import check_json
from mtmd.web.settings import JsonLimits

ROOM = JsonLimits(bytes=10_000, values=100, deep=5)


WORDS = [
    b'"', b"\\", b"\\\\", b'\\"', b"[", b"]", b"{", b"}", b",", b"data:", b"/9j/", b"\\/9j\\/", b"Qk",
    b"iVBORw0KGgo", b"aaaa", b"x", b"\\/", b"\\n",
]  # fmt: skip


def refused(data, limits=ROOM):
    try:
        check_json(data if isinstance(data, bytes) else json.dumps(data).encode(), limits)
    except ApiError as error:
        return error.status
    return None


@pytest.mark.parametrize(
    "data, status",
    [
        ([1] * 90, None),
        ([1] * 110, 413),
        ([[]] * 60, 413),
        ({str(i): 0 for i in range(60)}, 413),
        ([[[[[1]]]]], None),
        ([[[[[[1]]]]]], 400),
        (["[[[[[[[[{{{{" * 10], None),
        (["\\" * 1000 + '"' * 500 + ',"[' * 200], None),
        ("x" * 9000, None),
        ("x" * 11_000, 413),
        (b" " * 11_000, 413),
        (b"9" * 11_000, 413),
        (["data:" + "x" * 100_000] * 3, None),
        (["data:" + "x" * 100_000, "x" * 11_000], 413),
        (["xdata:" + "x" * 100_000], 413),
        (b'"' * 100_000, 413),
        (b'"data:' + b"\\" * 100_000, 413),
        (b"[" * 9000, 400),
        (b"[]" * 4000, 413),
        (b"", None),
        (b'{"', None),
        (b"]]]]]]", None),
    ],
)
def test_bounds(data, status):
    assert refused(data) == status


def test_what_is_inside_of_texts_is_not_counted():
    """Random JSON against what Python's own reader makes of it."""
    chance = random.Random(5)

    def value(depth):
        kind = chance.randrange(4 if depth else 2)
        if kind == 0:
            return "".join(chance.choice('ab\\"[]{},:é\n') for _ in range(chance.randrange(9)))
        if kind == 1:
            return chance.choice([1, -2.5, None, True])
        if kind == 2:
            return [value(depth - 1) for _ in range(chance.randrange(4))]
        return {chance.choice('ab"\\[') * i: value(depth - 1) for i in range(chance.randrange(4))}

    def deep(made):
        if isinstance(made, dict):
            made = list(made.values())
        return 1 + max(map(deep, made), default=0) if isinstance(made, list) else 0

    for _ in range(500):
        made = value(4)
        data = json.dumps(made).encode()
        for maximum in range(5):
            fits = refused(data, JsonLimits(bytes=1 << 20, values=10_000, deep=maximum)) is None
            assert fits == (deep(made) <= maximum), data


def test_where_pieces_end_changes_nothing(monkeypatch):
    chance, seen = random.Random(3), set()
    for _ in range(5000):
        data = b"".join(chance.choice(WORDS) for _ in range(chance.randrange(40)))
        few, many = chance.randrange(1, 80), 1 << 20
        limits = JsonLimits(
            *chance.choice([(few, many, many), (many, few // 4, many), (many, many, few // 16)])
        )
        monkeypatch.setattr(json_limits, "PIECE", many)
        expected = refused(data, limits)
        monkeypatch.setattr(json_limits, "PIECE", chance.choice((1, 2, 3, 5, 7, 16)))
        assert refused(data, limits) == expected, data
        seen.add(expected)
    assert seen == {None, 400, 413}
