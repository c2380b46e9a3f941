"""Damage done to model files, told by a random generator: the same seed does the same. Each
function returns what it made and what it did.

Bytes in general, JSON by its values, safetensors headers by their fields, chat templates by their
statements; GGUF is in mutations_gguf.
"""

from __future__ import annotations

import json
import math
import random
from typing import Any

Made = tuple[bytes, str]

EXTREME = (
    0,
    1,
    2,
    3,
    5,
    7,
    63,
    64,
    65,
    255,
    1000,
    4096,
    65_537,
    1 << 20,
    1 << 24,
    (1 << 31) - 1,
    1 << 31,
    1 << 32,
    (1 << 53) + 1,
    (1 << 63) - 1,
    1 << 63,
    10**18,
    10**60,
    10**400,
)
FRACTIONS = (0.5, 1.5, 1e-8, 1e-45, 1e-320, 1e39, 1e300, math.nan, math.inf, -math.inf, -0.0, -1.5)
TEXTS = (
    "",
    " ",
    "x",
    "0",
    "null",
    "a b",
    "<image>",
    "<|image_pad|>",
    "<eos>",
    "../../etc/passwd",
    "/",
    "gemma3",
    "default",
    "yarn",
    "\x00",
    "\ud800",
    "\u2028two\nlines\x1b[31m",
    "é" * 300,
    "日本語",
    "👩‍👩‍👧",
    "\ufdd0",
    "{{",
    "{% for",
    "(a+)+$",
    "a" * 5000,
)
_RAW = "\x01raw"  # stands for text that json.dumps cannot write
_TWICE = "\x01twice"


def mutate_bytes(content: bytes, rng: random.Random, within: int | None = None) -> Made:
    """One to three changes to bytes, those before `within` if given."""
    data, done = bytearray(content), []
    for _ in range(rng.choice((1, 1, 2, 3))):
        limit = max(1, min(len(data), within or len(data)))
        at, length = rng.randrange(limit), rng.choice((1, 2, 8, 33, 1000))
        kind = rng.choice(("flip", "put", "insert", "delete", "cut", "repeat", "zero", "number"))
        done.append(f"{kind} at {at}, {length}")
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == "put":
            data[at : at + length] = rng.randbytes(length)
        elif kind == "insert":
            data[at:at] = rng.randbytes(length)
        elif kind == "delete":
            del data[at : at + length]
        elif kind == "cut":
            del data[at:]
        elif kind == "repeat":
            data[at:at] = data[at : at + length] * rng.choice((1, 1, 3, 50))
        elif kind == "zero":
            data[at : at + length] = bytes(len(data[at : at + length]))
        else:
            size = rng.choice((1, 4, 8))
            data[at : at + size] = (rng.choice(EXTREME) & (1 << 8 * size) - 1).to_bytes(
                size, "little"
            )
    return bytes(data), "; ".join(done)


def mutate_json(content: bytes, rng: random.Random) -> Made:
    """One to three values replaced, removed, repeated or renamed; now and then the bytes
    instead.
    """
    if rng.random() < 0.12:
        return mutate_bytes(content, rng)
    root = [json.loads(content)]
    done, raw = [], []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key, path = _location(root, rng)
        done.append(path + _change(holder, key, rng, raw, root))
    text = json.dumps(root[0]) if root else ""
    for what in raw:
        text = text.replace(json.dumps(_RAW), what, 1)
    return text.replace(json.dumps(_TWICE)[1:], '"').encode(), "; ".join(done)


def _location(root: list[Any], rng: random.Random) -> tuple[Any, Any, str]:
    """A value by its holder and key: a walk from the root, drawn to where more values lie."""
    holder, key, path = root, 0, ""
    while rng.random() < 0.97 or not path:
        value = holder[key] if holder else None
        if not isinstance(value, (dict, list)) or not value:
            break
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        holder, key = value, rng.choices(keys, [math.sqrt(_leaves(value[k])) for k in keys])[0]
        path += f".{key!r:.30}"
        if rng.random() < 0.1:
            break
    return holder, key, path


def _leaves(value: Any) -> int:
    if isinstance(value, (dict, list)):
        return 1 + sum(map(_leaves, value.values() if isinstance(value, dict) else value))
    return 1


def _change(holder: Any, key: Any, rng: random.Random, raw: list[str], root: list[Any]) -> str:
    if not holder:
        return ": nothing left"
    kind = rng.choices(
        ("value", "remove", "rename", "twice", "exchange", "deep"), (14, 3, 1, 1, 2, 1)
    )[0]
    if kind == "value":
        holder[key] = replacement(holder[key], rng)
        return f" = {holder[key]!r:.60}"
    if kind == "remove":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[rng.choice((key + "x", key.upper(), *TEXTS))] = holder.pop(key)
    elif kind == "twice" and isinstance(holder, dict):
        holder[key + _TWICE] = replacement(holder[key], rng)
    elif kind == "exchange":
        other, at, _ = _location(root, rng)
        if other:
            value = json.loads(json.dumps(other[at]))
            holder[key] = value
    else:
        depth = rng.choice((5, 100, 900, 100_000))
        holder[key] = _RAW
        raw.append(
            rng.choice(
                (
                    "[" * depth + "]" * depth,
                    '{"a":' * depth + "1" + "}" * depth,
                    "1" * depth,
                    "01",
                    "nul",
                    "1e999",
                    "'x'",
                )
            )
        )
    return f" {kind}"


def replacement(value: Any, rng: random.Random) -> Any:
    """Another value: of the same kind but unfit, or of another kind."""
    if isinstance(value, bool):
        same: list[Any] = [not value]
    elif isinstance(value, (int, float)):
        same = [value + 1, value - 1, -value, value * 2, value * 3, value // 2, value * 1000]
    elif isinstance(value, str):
        same = [value + "x", value * 2, value[:-1], value.upper(), value[::-1]]
    elif isinstance(value, list):
        same = [
            value * 2,
            value[:-1],
            value[::-1],
            value[1:],
            [value],
            value * 300 if len(value) < 100 else [],
        ]
    elif isinstance(value, dict):
        same = [
            {k: value[k] for k in list(value)[1:]},
            {"x": value},
            list(value.values()),
            {**value, "x": 1},
        ]
    else:
        same = [0, ""]
    others = [
        None,
        True,
        False,
        [],
        {},
        [None],
        {"a": None},
        [1, 2, 3],
        [[]],
        str(value)[:200],
        [value, value],
        {"": value},
    ]
    pool = rng.choice(
        (same, same, others, EXTREME, tuple(-e for e in EXTREME[:-2]), FRACTIONS, TEXTS)
    )
    return rng.choice(pool)


def mutate_safetensors(content: bytes, rng: random.Random) -> Made:
    """The header's length, its JSON, single tensors in it, or the data."""
    length = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + length], content[8 + length :]
    kind = rng.choices(("bytes", "json", "tensor", "data", "length"), (3, 5, 8, 3, 1))[0]
    if kind == "bytes":
        return mutate_bytes(content, rng, rng.choice((8, 8 + length, len(content))))
    if kind == "length":
        number = rng.choice((*EXTREME[:-2], length - 1, length + 1, len(content), len(content) - 8))
        return (number & (1 << 64) - 1).to_bytes(
            8, "little"
        ) + header + data, f"header of {number} bytes"
    if kind == "data":
        data, what = _numbers(data, rng)
    elif kind == "json":
        header, what = mutate_json(header, rng)
    else:
        header, what = _mutate_tensor(header, rng)
    return len(header).to_bytes(8, "little") + header + data, what


def _numbers(data: bytes, rng: random.Random) -> Made:
    """The data with a run of it as other numbers: NaN, infinite, huge, random; or cut short, or
    longer.
    """
    at, what = (
        rng.randrange(len(data)) // 4 * 4,
        rng.choice(("nan", "inf", "huge", "random", "cut", "longer")),
    )
    runs = {
        "nan": b"\xff\xff\xff\x7f",
        "inf": b"\x00\x00\x80\x7f",
        "huge": b"\xff\xff\x7f\x7f",
        "random": rng.randbytes(4096),
    }
    if what in runs:
        run = (runs[what] * 1024)[: 4 * rng.choice((1, 64, 1024))]
        return data[:at] + run[: len(data) - at] + data[at + len(run) :], f"{what} at {at}"
    return (data[:at], f"cut at {at}") if what == "cut" else (data + bytes(at), f"{at} bytes more")


def _mutate_tensor(header: bytes, rng: random.Random) -> Made:
    entries = json.loads(header)
    name = rng.choice([n for n in entries if n != "__metadata__"])
    entry, kind = (
        entries[name],
        rng.choice(
            ("dtype", "shape", "offsets", "name", "gone", "same bytes", "exchange", "field")
        ),
    )
    if kind == "dtype":
        entry["dtype"] = rng.choice(
            ("F64", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3", "f32", "F4", "C64", 7, None)
        )
    elif kind == "shape":
        entry["shape"] = rng.choice(
            (
                entry["shape"][::-1],
                [*entry["shape"], 1],
                [math.prod(entry["shape"])],
                [0],
                [],
                [-1],
                [1 << 62, 4],
                [1.0],
                None,
                [1] * 65,
                [True],
            )
        )
    elif kind == "offsets":
        start, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice(
            (
                [end, start],
                [start + 4, end + 4],
                [start, end - 4],
                [-4, end],
                [start],
                [0, end - start],
                [1 << 62, (1 << 62) + end - start],
                [start, 1 << 64],
                None,
            )
        )
    elif kind == "name":
        entries[rng.choice((name + "x", name.upper(), *TEXTS))] = entries.pop(name)
    elif kind == "gone":
        del entries[name]
    elif kind == "same bytes":  # the same tensor, read as numbers of half the size
        *leading, last = entry["shape"] or [1]
        entry.update(dtype="BF16", shape=[*leading, 2 * last])
    elif kind == "exchange":
        other = rng.choice([n for n in entries if n != "__metadata__"])
        entries[name], entries[other] = entries[other], entries[name]
    else:
        entry.pop(rng.choice(list(entry)))
    return json.dumps(entries).encode(), f"{name} {kind}"


HOSTILE = (
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(10**12) %}{% endfor %}",
    "{{ 'x' * 10**10 }}",
    "{{ 9**9**9 }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{{ a }}{% "
    "endfor %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% macro m(x) %}{{ m(x ~ x) }}{% endmacro %}{{ m('xx') }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id') }}",
    "{{ self }}",
    "{{ self._TemplateReference__context }}",
    "{{ lipsum.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{% extends 'x' %}",
    "{{ raise_exception('no') }}",
    "{{ raise_exception(messages) }}",
    "{{ 1 / 0 }}",
    "{{ 1 % 0 }}",
    "{{ messages[10**9] }}",
    "{{ messages[0].content[0].missing.more }}",
    "{{ undefined_thing }}",
    "{{ undefined_thing() }}",
    "{{ undefined_thing | upper | join(1) }}",
    "{{ messages | tojson(indent=10**9) }}",
    "{{ '%999999999d' | format(1) }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ 'x'.center(10**9) }}",
    "{{ [messages] * 10**7 }}",
    "{{ range(10**9) | list }}",
    "{{ range(10**9) | sum }}",
    "{{ 'x' | indent(10**9) }}",
    "{{ '\\ud800' }}",
    "{{ strftime_now('%Y' * 10**6) }}",
    "{{ strftime_now(1) }}",
    "{{ strftime_now('%') }}",
    "{% set x = namespace(a=1) %}{% set x.a = x %}{{ x.a }}",
    "{% call(x) undefined() %}{% endcall %}",
    "{% filter replace('', 'xxxxxxxxxxxxxxxx' * 10000) %}abcdefgh{% endfilter %}",
    "{% set a = 'x' * 1000 %}{% for i in range(30) %}{% set a = a ~ a %}{% endfor %}{{ a }}",
    "{{ 'a'.join(range(10**8)) }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor "
    "%}{{ ns.a }}",
    "{{ dict(a=1)['b']['c'] }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ loop }}",
    "{{ caller() }}",
    "{{ super() }}",
    "{{ not }}",
    "{{ {'a': {}} | dictsort(by=7) }}",
    "{{ messages | map('x') | list }}",
    "{{ messages | sort }}",
    "{{ (messages, messages) | unique | list }}",
    "{{ 'a' | int(base=99) }}",
    "{{ 'x' | float + [] }}",
    "{{ -messages }}",
    "{{ messages + 1 }}",
    "{{ 1 < 'a' }}",
    "{% break %}",
    "{% continue %}",
    "{% block a %}{% block a %}{% endblock %}{% endblock %}",
    "{% raw %}",
    "{#",
    "{{ '",
    "{% endfor %}",
    "{% if %}",
    "{% set %}",
    "{{ a b }}",
    "{{ (" * 300,
    "{% if 1 %}" * 200,
    "{{ [" + "[" * 3000 + "]" * 3000 + "] }}",
    "{{ 1" + " + 1" * 20_000 + " }}",
    "{{ 'x' ~ " * 2000 + "1 }}",
    "",
    "no messages here",
    "\x00",
    "\ufdd0",
    "{{ messages }}",
    "{{ '<image>' * 3 }}",
    "{{ '<|image_pad|>' * 9 }}",
    "{{ 'a ' * 100000 }}",
    "{{ '<start_of_image>' }}{{ bos_token }}",
    "{{ bos_token * 5 }}",
    "{{ messages[0].content.append(1) }}",
    "{{ messages.clear() }}",
)


def mutate_template(content: bytes, rng: random.Random) -> Made:
    """A hostile template, a hostile statement within a good one, words of it doubled or gone, or
    bytes changed.
    """
    text = content.decode()
    kind, hostile, at = (
        rng.choice(("whole", "within", "words", "words", "bytes")),
        rng.choice(HOSTILE),
        rng.randrange(len(text)),
    )
    if kind == "whole":
        return hostile.encode("utf-8", "surrogatepass"), f"only {hostile!r:.80}"
    if kind == "within":
        return (text[:at] + hostile + text[at:]).encode(
            "utf-8", "surrogatepass"
        ), f"{hostile!r:.80} at {at}"
    if kind == "bytes":
        return mutate_bytes(content, rng)
    words, done = text.split(" "), []
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(words))
        words[at : at + 1] = rng.choice(
            ([], [words[at]] * 2, [rng.choice(words)], [words[at][::-1]])
        )
        done.append(f"word {at}")
        if not words:
            break
    return " ".join(words).encode(), "; ".join(done)
