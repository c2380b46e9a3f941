"""GGUF files: what the gguf package writes is read exactly and lazily; what is wrong is named."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.gguf_file import DTYPES, GgufFile
from mtmd.kernels.quantization.blocks import BLOCKS, OWN_IDS, row_bytes

GOLDEN = Path(__file__).parents[3].parent / "shared" / "golden"
NUMPY = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
}
STORED = [name for name, block in BLOCKS.items() if block.id < OWN_IDS]
SHAPES = [(256,), (3, 512), (2, 3, 256), (2, 1, 3, 256)]


def save(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def raw_rows(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    size = 2 * shape[-1] if kind == "BF16" else row_bytes(kind, shape[-1])
    return rng.integers(0, 256, (*shape[:-1], size), dtype=np.uint8)


def expect_as_the_reader_says(path: Path) -> None:
    actual, expected = GgufFile(path), GGUFReader(path)
    assert actual.names() == sorted(t.name for t in expected.tensors)
    assert actual.bytes == sum(int(t.n_bytes) for t in expected.tensors)
    for t in expected.tensors:
        shape = tuple(reversed(t.shape.tolist()))
        assert (actual.shape(t.name), actual.kind(t.name), actual.read(t.name).nbytes) == (
            shape,
            t.tensor_type.name,
            t.n_bytes,
        )
        assert actual.meta(t.name) == (shape, DTYPES.get(t.tensor_type.name, torch.uint8))
        tensor = actual.read(t.name)
        assert tensor.dtype == actual.meta(t.name)[1]
        assert tuple(tensor.shape) == (shape if t.tensor_type.name in DTYPES else t.data.shape)
        assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == t.data.tobytes(), t.name
    fields = {
        key: field.contents()
        for key, field in expected.fields.items()
        if not key.startswith("GGUF.")
    }
    assert dict(actual.metadata) == fields


@pytest.mark.parametrize("version", [2, 3])
def test_every_type_and_rank(version: int, tmp_path: Path) -> None:
    rng, writer = np.random.default_rng(0), GGUFWriter(tmp_path / "x.gguf", "test")
    for number, shape in enumerate(SHAPES):
        for kind, dtype in NUMPY.items():
            writer.add_tensor(f"{kind}.{number}", rng.integers(-100, 100, shape).astype(dtype))
        for kind in ("BF16", *STORED):
            writer.add_tensor(
                f"{kind}.{number}", raw_rows(kind, shape, rng), raw_dtype=GGMLQuantizationType[kind]
            )
    writer.add_tensor("scalar", np.float32(2.5).reshape(()))
    save(writer)
    content = bytearray((tmp_path / "x.gguf").read_bytes())
    content[4:8] = version.to_bytes(4, "little")
    (tmp_path / "x.gguf").write_bytes(content)
    expect_as_the_reader_says(tmp_path / "x.gguf")
    file = GgufFile(tmp_path / "x.gguf")
    assert len(file.names()) == len(SHAPES) * (len(NUMPY) + 1 + len(STORED)) + 1
    assert file.shape("scalar") == () and file.read("scalar").item() == 2.5


@pytest.mark.skipif(
    not GOLDEN.is_dir(), reason="GOLDEN CHECKPOINTS ARE MISSING: there is no ../shared/golden"
)
def test_golden_files() -> None:
    files = sorted(GOLDEN.rglob("*.gguf"))
    assert len(files) > 20
    for path in files:
        expect_as_the_reader_says(path)


def test_metadata_of_every_type(tmp_path: Path) -> None:
    numbers = {
        "UINT8": 255,
        "INT8": -128,
        "UINT16": 65535,
        "INT16": -32768,
        "UINT32": 1 << 31,
        "INT32": -(1 << 31),
        "FLOAT32": 0.5,
        "BOOL": True,
        "UINT64": 1 << 63,
        "INT64": -(1 << 63),
        "FLOAT64": 0.1,
    }
    writer = GGUFWriter(tmp_path / "x.gguf", "test")
    for name, value in numbers.items():
        writer.add_key_value(name, value, GGUFValueType[name])
        writer.add_key_value(f"{name}s", [value, 0, 1], GGUFValueType.ARRAY, GGUFValueType[name])
    writer.add_string("text", "größer 🙂\n")
    writer.add_array("tokens", ["a", "", "größer", b"\xe2\x96"])
    save(writer)
    metadata = GgufFile(tmp_path / "x.gguf").metadata
    for name, value in numbers.items():
        assert metadata[name] == value and type(metadata[name]) is type(value)
        assert metadata[f"{name}s"] == [value, 0, 1] and type(metadata[f"{name}s"][1]) is type(
            value
        )
    assert metadata["text"] == "größer 🙂\n" and metadata["tokens"][:3] == ["a", "", "größer"]
    assert metadata["tokens"][3].encode("utf-8", "surrogateescape") == b"\xe2\x96"
    assert (
        "none" not in metadata
        and metadata.get("none") is None
        and len(metadata) == 1 + 2 * len(numbers) + 2
    )


def split(folder: Path, parts: int = 3) -> list[Path]:
    writer = GGUFWriter(folder / "m.gguf", "test", split_max_tensors=2)
    writer.add_uint32("test.block_count", 7)
    for number in range(2 * parts - 1):
        writer.add_tensor(f"t{number}", np.full((number + 1,), number, np.float32))
    save(writer)
    return sorted(folder.glob("*.gguf"))


BYTES = [b"", b"\xff", b"a\xff\xff", b"\xe2\x96", b"\x81", b"\xc3", "ß".encode(), b"\x00", b""]


@pytest.mark.parametrize("texts", [BYTES, [t for t in BYTES if b"\xff" not in t], [b"x"]])
def test_strings_of_an_array_that_are_parts_of_characters(
    texts: list[bytes], tmp_path: Path
) -> None:
    """Each is decoded for itself, though all are decoded together."""
    writer = GGUFWriter(tmp_path / "x.gguf", "test")
    writer.add_array("tokens", texts)
    save(writer)
    tokens = GgufFile(tmp_path / "x.gguf").metadata["tokens"]
    assert tokens == [text.decode("utf-8", "surrogateescape") for text in texts]


def test_any_part_of_a_split_file_opens_all(tmp_path: Path) -> None:
    paths = split(tmp_path)
    assert [path.name for path in paths] == [f"m-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    for path in paths:
        file = GgufFile(path)
        assert file.names() == [f"t{n}" for n in range(5)] and file.bytes == 4 * 15
        assert file.metadata["test.block_count"] == 7  # a key of the first part alone
        assert [file.read(f"t{n}").tolist() for n in range(5)] == [[n] * (n + 1) for n in range(5)]


# Files written by hand, to be wrong in one place each.


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, elements: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def tensor(
    name: bytes = b"a", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0
) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def gguf(
    keys: tuple[bytes, ...] = (),
    tensors: tuple[bytes, ...] = (tensor(),),
    data: bytes = bytes(64),
    start: bytes = b"GGUF\3\0\0\0",
    counts: tuple[int, int] | None = None,
    align: int = 32,
) -> bytes:
    head = (
        start
        + struct.pack("<QQ", *(counts or (len(tensors), len(keys))))
        + b"".join(keys)
        + b"".join(tensors)
    )
    return head + bytes(-len(head) % align) + data


U32, STRING, ARRAY, MAX = 4, 8, 9, (1 << 64) - 1
WRONG: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "magic": (gguf(start=b"GGML\3\0\0\0"), "begins with b'GGML'; expected b'GGUF'"),
    "shorter than its beginning": (b"GGUF\3\0\0", "cut off in the version"),
    "big endian": (gguf(start=b"GGUF\0\0\0\3"), "big-endian GGUF file"),
    "version 0": (gguf(start=b"GGUF\0\0\0\0"), "GGUF version 0; expected 2 or 3"),
    "version 1": (gguf(start=b"GGUF\1\0\0\0"), "GGUF version 1; expected 2 or 3"),
    "version 4": (gguf(start=b"GGUF\4\0\0\0"), "GGUF version 4; expected 2 or 3"),
    "tensor count": (gguf(counts=(MAX, 0)), f"says it has {MAX} tensors; expected at most 4"),
    "tensor count beyond the list": (gguf(counts=(2, 0)), "a tensor without a name"),
    "key count": (gguf(counts=(1, 1 << 40)), f"says it has {1 << 40} keys; expected at most"),
    "key name length": (gguf((struct.pack("<Q", MAX),)), f"the name of a key has {MAX} bytes"),
    "key name beyond the end": (
        gguf((struct.pack("<Q", 5000),), ()),
        "cut off in the name of a key",
    ),
    "key name empty": (gguf((key(b"", U32, bytes(4)),)), "a key without a name"),
    "key name not text": (
        gguf((key(b"\xff", U32, bytes(4)),)),
        "the name of a key that is not UTF-8",
    ),
    "key twice": (
        gguf((key(b"k", U32, bytes(4)), key(b"k", U32, bytes(4)))),
        "has the key 'k' twice",
    ),
    "key type": (
        gguf((key(b"k", 13, bytes(8)),)),
        "the key 'k' of type 13; expected a type from 0 to 12",
    ),
    "string length": (
        gguf((key(b"k", STRING, struct.pack("<Q", 1 << 62)),)),
        f"the value of 'k' has {1 << 62} bytes",
    ),
    "string beyond the end": (
        gguf((key(b"k", STRING, struct.pack("<Q", 500)),)),
        "cut off in the value of 'k'|the value of 'k' has 500",
    ),
    "string not text": (
        gguf((key(b"k", STRING, text(b"\xc3")),)),
        "the value of 'k' that is not UTF-8",
    ),
    "array length": (
        gguf((key(b"k", ARRAY, array(U32, MAX)),)),
        f"'k' has {MAX} elements; expected at most",
    ),
    "array length beyond the end": (
        gguf((key(b"k", ARRAY, array(U32, 1000)),)),
        "'k' has 1000 elements; expected at most",
    ),
    "array element type": (gguf((key(b"k", ARRAY, array(13, 1)),)), "the array 'k' of type 13"),
    "array of arrays": (
        gguf((key(b"k", ARRAY, array(ARRAY, 1, array(U32, 0))),)),
        "arrays within the array 'k'",
    ),
    "string array length": (
        gguf((key(b"k", ARRAY, array(STRING, 1 << 61)),)),
        f"'k' has {1 << 61} elements; expected at most",
    ),
    "string in array": (
        gguf((key(b"k", ARRAY, array(STRING, 2, struct.pack("<Q", MAX))),)),
        "cut off in the strings of 'k'",
    ),
    "string in array, summed over 64 bits": (
        gguf((key(b"k", ARRAY, array(STRING, 3, text(b"a") + struct.pack("<Q", (1 << 63) - 1))),)),
        "cut off in the strings of 'k'",
    ),
    "last string in array": (
        gguf((key(b"k", ARRAY, array(STRING, 2, text(b"a") + struct.pack("<Q", 4000))),)),
        "cut off in the strings",
    ),
    "alignment 0": (
        gguf((key(b"general.alignment", U32, bytes(4)),)),
        "general.alignment 0; expected a power of two",
    ),
    "alignment 24": (
        gguf((key(b"general.alignment", U32, struct.pack("<I", 24)),)),
        "general.alignment 24",
    ),
    "alignment large": (
        gguf((key(b"general.alignment", U32, struct.pack("<I", 1 << 17)),)),
        f"general.alignment {1 << 17}",
    ),
    "alignment text": (
        gguf((key(b"general.alignment", STRING, text(b"32")),)),
        "general.alignment '32'",
    ),
    "alignment list": (
        gguf((key(b"general.alignment", ARRAY, array(U32, 1, bytes(4))),)),
        "general.alignment ",
    ),
    "split.count text": (
        gguf((key(b"split.count", STRING, text(b"2")),)),
        "split.count '2'; expected a whole number",
    ),
    "tensor name length": (
        gguf((), (struct.pack("<Q", 1 << 50) + bytes(64),)),
        f"the name of a tensor has {1 << 50} bytes",
    ),
    "tensor name not text": (
        gguf((), (tensor(b"\x80"),)),
        "the name of a tensor that is not UTF-8",
    ),
    "tensor twice": (gguf((), (tensor(), tensor(offset=32))), "has the tensor 'a' twice"),
    "five dimensions": (
        gguf((), (tensor(dims=(1, 1, 1, 1, 1)),)),
        "'a' with 5 dimensions; expected at most 4",
    ),
    "many dimensions": (
        gguf((), (text(b"a") + struct.pack("<I", 0xFFFFFFFF),)),
        "'a' with 4294967295 dimensions",
    ),
    "dimension 0": (
        gguf((), (tensor(dims=(4, 0)),)),
        r"shape \[0, 4\]; expected dimensions greater than 0",
    ),
    "dimension too large": (
        gguf((), (tensor(dims=(MAX,)),)),
        "'a' ends at byte .*; expected at most",
    ),
    "product over 64 bits": (
        gguf((), (tensor(dims=(1 << 32, 1 << 32)),)),
        "'a' ends at byte .*; expected at most",
    ),
    "type": (gguf((), (tensor(kind=31),)), "'a' of type 31; expected one of F32, "),
    "part of a block": (
        gguf((), (tensor(dims=(33,), kind=8),)),
        r"shape \[33\] as Q8_0; expected rows of a multiple of 32",
    ),
    "blocks across rows": (
        gguf((), (tensor(dims=(128, 2), kind=12),)),
        r"shape \[2, 128\] as Q4_K; expected rows of a multiple of 256",
    ),
    "a number as a block": (gguf((), (tensor(dims=(), kind=8),)), r"shape \[\] as Q8_0"),
    "offset out of alignment": (
        gguf((), (tensor(offset=4),)),
        "'a' at offset 4; expected a multiple of 32",
    ),
    "offset beyond the end": (
        gguf((), (tensor(offset=1 << 60),)),
        "cut off: tensor 'a' ends at byte",
    ),
    "offset near the end of 64 bits": (
        gguf((), (tensor(offset=MAX - 31),)),
        "cut off: tensor 'a' ends at byte",
    ),
    "overlap": (
        gguf((), (tensor(dims=(16,)), tensor(b"b", offset=32)), bytes(128)),
        "'b' at byte .*, over 'a'",
    ),
    "same place": (gguf((), (tensor(), tensor(b"b"))), "'b' at byte .*, over 'a'"),
    "data cut off": (gguf()[:-50], "cut off: tensor 'a' ends at byte"),
    "list of tensors cut off": (gguf()[:52], "cut off in the offset of 'a'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_in_one_line(name: str, tmp_path: Path) -> None:
    content, message = WRONG[name]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message) as error:
        GgufFile(tmp_path / "x.gguf")
    assert (
        "\n" not in str(error.value)
        and str(tmp_path / "x.gguf") in str(error.value)
        and len(str(error.value)) < 700
    )


def test_split_files_that_do_not_belong_together(tmp_path: Path) -> None:
    def part(at: int, name: bytes, number: int, count: int = 2, total: int = 2) -> Path:
        keys = [(b"split.no", number), (b"split.count", count), (b"split.tensors.count", total)]
        path = tmp_path / f"m-{at:05}-of-00002.gguf"
        path.write_bytes(
            gguf(
                tuple(key(name, U32, struct.pack("<I", value)) for name, value in keys),
                (tensor(name),),
            )
        )
        return path

    first = part(1, b"a", 0)
    with pytest.raises(ModelError, match=re.escape("lacks m-00002-of-00002.gguf, part 2 of 2")):
        GgufFile(first)
    for number, count in ((0, 2), (1, 3)):
        part(2, b"b", number, count)
        with pytest.raises(
            ModelError,
            match=rf"00002-of-00002\.gguf says it is part {number + 1} of {count}; expected 2 of 2",
        ):
            GgufFile(first)
    second = part(2, b"a", 1)
    with pytest.raises(
        ModelError,
        match=r"tensor 'a' is in both m-00001-of-00002\.gguf and .*m-00002-of-00002\.gguf",
    ):
        GgufFile(second)
    part(2, b"b", 1)
    assert GgufFile(second).names() == ["a", "b"]
    part(1, b"a", 0, total=9)
    with pytest.raises(ModelError, match="has 2 tensors in its 2 parts; expected 9"):
        GgufFile(second)
    with pytest.raises(
        ModelError, match=re.escape("not by its name; expected NAME-00001-of-00002.gguf")
    ):
        GgufFile(first.rename(tmp_path / "m.gguf"))


def test_the_same_by_hand_and_right(tmp_path: Path) -> None:
    keys = (key(b"none", ARRAY, array(U32, 0)), key(b"no text", ARRAY, array(STRING, 0)))
    (tmp_path / "x.gguf").write_bytes(
        gguf(keys, (tensor(), tensor(b"b", offset=32)), struct.pack("<4f16x4f16x", *range(8)))
    )
    file = GgufFile(tmp_path / "x.gguf")
    assert file.metadata["none"] == [] and file.metadata["no text"] == []
    assert file.read("a").tolist() == [0, 1, 2, 3] and file.read("b").tolist() == [4, 5, 6, 7]
    with pytest.raises(ModelError, match=r"has no tensor 'c'; it has 2 others"):
        file.read("c")
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "none.gguf")


def test_reading_maps_the_file_and_copies_nothing(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "x.gguf", "test")
    writer.add_tensor("a", np.arange(1 << 16, dtype=np.float32))
    save(writer)
    result = GgufFile(tmp_path / "x.gguf").read("a")
    maps = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / "x.gguf"))
    ]
    ranges = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in maps]
    assert any(
        low <= result.data_ptr() and result.data_ptr() + result.nbytes <= high
        for low, high in ranges
    )
    assert all(line.split()[1] == "r--s" for line in maps)


def test_data_out_of_alignment_is_still_right(tmp_path: Path) -> None:
    alignment = key(b"general.alignment", U32, struct.pack("<I", 1))
    for name in (b"a", b"ab", b"abc", b"abcd"):
        content = gguf(
            (alignment,),
            (tensor(name), tensor(b"q", (32,), 8, 16)),
            struct.pack("<4f34B", *range(38)),
            align=1,
        )
        (tmp_path / "x.gguf").write_bytes(content)
        file = GgufFile(tmp_path / "x.gguf")
        result = file.read(name.decode())
        assert result.tolist() == [0, 1, 2, 3] and result.data_ptr() % 8 == 0
        assert file.read("q").tolist() == list(range(4, 38)) and file.read("q").data_ptr() % 8 == 0


OPEN = """
import resource, sys, time
from pathlib import Path
from mtmd.kernels.checkpoint.gguf_file import GgufFile
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew: a child begins with its parent's
before, start = resident(), time.perf_counter()
file = GgufFile(Path(sys.argv[1]))
seconds, opened = time.perf_counter() - start, resident() - before
status = Path("/proc/self/status").read_text()
peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024 - before
start = time.perf_counter()
tokens = file.metadata["tokenizer.ggml.tokens"]
print(len(file.names()), len(tokens), opened, peak, seconds, time.perf_counter() - start)
"""


def test_a_large_vocabulary_opens_quickly_and_in_little_memory(tmp_path: Path) -> None:
    path, count = tmp_path / "x.gguf", 150_000
    tokens = b"".join(text(f"token number {n}".encode()) for n in range(count))
    merges = b"".join(text(f"token {n}".encode()) for n in range(count))
    keys = (
        key(b"tokenizer.ggml.tokens", ARRAY, array(STRING, count, tokens)),
        key(b"tokenizer.ggml.merges", ARRAY, array(STRING, count, merges)),
        key(b"tokenizer.ggml.token_type", ARRAY, array(U32, count, bytes(4 * count))),
    )
    size = 1 << 20  # bytes of each tensor; the file is sparse
    path.write_bytes(
        gguf(
            keys,
            tuple(tensor(b"blk.%d.weight" % n, (512, 512), 0, n * size) for n in range(400)),
            b"",
        )
    )
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 400 * size)
    done = subprocess.run(
        [sys.executable, "-c", OPEN, str(path)], capture_output=True, text=True, check=True
    )
    print(done.stdout)
    tensors, result, opened, peak, seconds, _ = (float(number) for number in done.stdout.split())
    assert (tensors, result) == (400, count)
    assert opened < 200e6 and peak < 200e6
    assert seconds < 10  # loosely: a machine may be busy
