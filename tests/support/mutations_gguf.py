"""Damage done to GGUF files, by their keys, tensors and bytes; see mutations."""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass
from typing import Any

from mutations import EXTREME, FRACTIONS, HOSTILE, TEXTS, Made, mutate_bytes

STRING, ARRAY = 8, 9
FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass
class Key:
    """`value`: a number, bytes for a string, a list for an array of `element`."""

    name: bytes
    type: int
    value: Any
    element: int = 0


@dataclass
class Tensor:
    """`dims` as they lie in the file, innermost first."""

    name: bytes
    dims: list[int]
    type: int
    offset: int


@dataclass
class Gguf:
    keys: list[Key]
    tensors: list[Tensor]
    data: bytes
    alignment: int
    header: int  # bytes before the data


def read(content: bytes) -> Gguf:
    """A sound file of version 3."""
    position = 24
    tensors, keys = struct.unpack_from("<QQ", content, 8)

    def take(format: str) -> Any:
        nonlocal position
        (value,) = struct.unpack_from(f"<{format}", content, position)
        position += struct.calcsize(f"<{format}")
        return value

    def one(type: int) -> Any:
        return take(f"{take('Q')}s") if type == STRING else take(FORMATS[type])

    result = []
    for _ in range(keys):
        name, type = one(STRING), take("I")
        if type == ARRAY:
            element = take("I")
            result.append(Key(name, type, [one(element) for _ in range(take("Q"))], element))
        else:
            result.append(Key(name, type, one(type)))
    entries = [
        Tensor(one(STRING), [take("Q") for _ in range(take("I"))], take("I"), take("Q"))
        for _ in range(tensors)
    ]
    alignment = next((k.value for k in result if k.name == b"general.alignment"), 32)
    start = -(-position // alignment) * alignment
    return Gguf(result, entries, content[start:], alignment, start)


def write(file: Gguf, *, count: int | None = None) -> bytes:
    """`count`: what the arrays say of their length."""
    out = [struct.pack("<4sIQQ", b"GGUF", 3, len(file.tensors), len(file.keys))]

    def text(value: bytes) -> bytes:
        return struct.pack("<Q", len(value)) + value

    def one(type: int, value: Any) -> bytes:
        if type == STRING:
            return text(value)
        if FORMATS[type] in "fd?":
            return struct.pack(f"<{FORMATS[type]}", value)
        size = struct.calcsize(FORMATS[type])
        return (int(value) & (1 << 8 * size) - 1).to_bytes(size, "little")

    for key in file.keys:
        out += [text(key.name), struct.pack("<I", key.type)]
        if key.type == ARRAY:
            out += [
                struct.pack("<IQ", key.element, len(key.value) if count is None else count),
                *(one(key.element, v) for v in key.value),
            ]
        else:
            out.append(one(key.type, key.value))
    for tensor in file.tensors:
        out += [
            text(tensor.name),
            struct.pack("<I", len(tensor.dims)),
            *(struct.pack("<Q", d & (1 << 64) - 1) for d in tensor.dims),
            struct.pack("<IQ", tensor.type, tensor.offset & (1 << 64) - 1),
        ]
    header = b"".join(out)
    return header + bytes(-len(header) % file.alignment) + file.data


def mutate_gguf(content: bytes, rng: random.Random) -> Made:
    """One to three keys or tensors changed, or the bytes of the header, or of the data."""
    file, kind = (
        read(content),
        rng.choices(("keys", "tensors", "header", "bytes", "count"), (12, 5, 2, 1, 1))[0],
    )
    if kind == "header":
        return mutate_bytes(content, rng, file.header)
    if kind == "bytes":
        return mutate_bytes(content, rng)
    if kind == "count":
        count = rng.choice(EXTREME[:-2]) & (1 << 64) - 1
        return write(file, count=count), f"arrays of {count}"
    change, parts = (_change_key, file.keys) if kind == "keys" else (_change_tensor, file.tensors)
    done = [change(file, rng) for _ in range(rng.choice((1, 1, 1, 2, 3))) if parts]
    return write(file), "; ".join(done)


def _change_key(file: Gguf, rng: random.Random) -> str:
    index = rng.randrange(len(file.keys))
    key, kind = (
        file.keys[index],
        rng.choices(("value", "type", "remove", "rename", "twice", "more"), (10, 4, 3, 1, 1, 1))[0],
    )
    if kind == "value":
        key.value = _elements(key, rng) if key.type == ARRAY else _value(key.type, key.value, rng)
    elif kind == "type":
        _retype(key, rng)
    elif kind == "remove":
        del file.keys[index]
    elif kind == "rename":
        key.name = rng.choice((key.name + b"x", key.name.upper(), b"\xff", b"", b"a" * 70_000))
    elif kind == "twice":
        file.keys.append(Key(key.name, 4, 1))
    else:
        architecture = next(
            (
                bytes(k.value)
                for k in file.keys
                if k.name == b"general.architecture" and k.type == STRING
            ),
            b"x",
        )
        name = rng.choice(
            (
                b"expert_count",
                b"rope.scaling.type",
                b"rope.scaling.factor",
                b"vocab_size",
                b"rope.dimension_sections",
                b"attention.head_count_kv",
                b"attention.key_length",
                b"n_deepstack_layers",
                b"attention.value_length",
            )
        )
        key = Key(architecture + b"." + name, 4, 0)
        _retype(key, rng)
        file.keys.append(key)
    return f"{key.name[:60]!r} {kind} {key.type} {key.value!r:.60}"


def _retype(key: Key, rng: random.Random) -> None:
    key.type = rng.choice((*FORMATS, STRING, ARRAY))
    if key.type == ARRAY:
        key.element = rng.choice((*FORMATS, STRING))
        key.value = [
            _value(key.element, 1, rng) for _ in range(rng.choice((0, 1, 2, 3, 4, 5, 1000)))
        ]
    else:
        key.value = _value(key.type, 1, rng)


def _value(type: int, old: Any, rng: random.Random) -> Any:
    if type == STRING:
        texts = [t.encode("utf-8", "surrogatepass") for t in (*TEXTS, *rng.sample(HOSTILE, 5))]
        return rng.choice(
            (
                *texts,
                b"\xff\xfe",
                b"\xc3",
                *((old + b"x", old[:-1]) if isinstance(old, bytes) else ()),
            )
        )
    if FORMATS[type] == "f":
        return rng.choice([f for f in FRACTIONS if not 3e38 < abs(f) < 1e308] + [0.0, 1.0, 1e38])
    if FORMATS[type] == "d":
        return rng.choice((*FRACTIONS, 0.0, 1.0))
    if FORMATS[type] == "?":
        return rng.random() < 0.5
    near = (old + 1, old - 1, old * 2, -old, 0) if isinstance(old, int) else (0, 1)
    return rng.choice((*near, *EXTREME[:-2], -1, -7, 3))


def _elements(key: Key, rng: random.Random) -> list[Any]:
    values, kind = (
        list(key.value),
        rng.choice(("one", "one", "few", "cut", "longer", "empty", "equal", "turned", "swap")),
    )
    if kind in ("one", "few") and values:
        for _ in range(1 if kind == "one" else 30):
            at = rng.randrange(len(values))
            values[at] = _value(key.element, values[at], rng)
    elif kind == "cut":
        values = values[: rng.randrange(len(values) + 1)]
    elif kind == "longer":
        values = values + values[: rng.choice((1, 2, 300))]
    elif kind == "empty":
        values = []
    elif kind == "equal" and values:
        values = [values[0]] * len(values)
    elif kind == "turned":
        values.reverse()
    elif values:
        a, b = rng.randrange(len(values)), rng.randrange(len(values))
        values[a], values[b] = values[b], values[a]
    return values


def _change_tensor(file: Gguf, rng: random.Random) -> str:
    index = rng.randrange(len(file.tensors))
    tensor = file.tensors[index]
    kind = rng.choice(
        ("dims", "dims", "type", "offset", "name", "remove", "twice", "exchange", "numbers")
    )
    if kind == "dims":
        tensor.dims = rng.choice(
            (
                tensor.dims[::-1],
                [*tensor.dims, 1],
                [*tensor.dims[:-1], 1],
                tensor.dims[1:],
                [2 * d for d in tensor.dims],
                [rng.choice(EXTREME[:-2]) for _ in tensor.dims],
                [],
                [0],
                [-1],
                [1] * 9,
                [1 << 62, 4],
            )
        )
    elif kind == "type":
        tensor.type = rng.choice((*range(42), 1 << 31))
    elif kind == "offset":
        tensor.offset = rng.choice(
            (
                0,
                1,
                tensor.offset + 32,
                tensor.offset - 32,
                1 << 40,
                1 << 63,
                len(file.data),
                rng.choice(file.tensors).offset,
            )
        )
    elif kind == "name":
        tensor.name = rng.choice(
            (
                tensor.name + b"x",
                tensor.name.upper(),
                b"\xff",
                b"",
                b"x" * 100,
                b"blk.99.attn_q.weight",
            )
        )
    elif kind == "remove":
        del file.tensors[index]
    elif kind == "twice":
        file.tensors.append(tensor)
    elif kind == "exchange":
        other = rng.choice(file.tensors)
        tensor.name, other.name = other.name, tensor.name
    else:
        run = rng.choice((b"\xff\x7f", b"\xff\xff", b"\x00\x7c", rng.randbytes(2))) * 512
        at = tensor.offset % max(len(file.data), 1)
        file.data = file.data[:at] + run[: len(file.data) - at] + file.data[at + len(run) :]
    return f"{tensor.name[:60]!r} {kind} {tensor.dims!r:.60} {tensor.type} {tensor.offset}"
