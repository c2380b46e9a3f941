"""Weight files: what is right is read exactly, what is wrong is named."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.open_weights import open_weights
from mtmd.kernels.checkpoint.safetensors_file import DTYPES, INDEX, SINGLE


def raw(header: object, data: bytes = b"", pad: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text += b" " * pad
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(folder: Path, content: bytes, name: str = SINGLE) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def sharded(folder: Path, weight_map: dict[str, object], **shards: dict[str, torch.Tensor]) -> Path:
    for name, tensors in shards.items():
        save_file(tensors, folder / f"{name}.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def test_every_dtype_and_shape_is_read_as_it_was_written(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"{key}.{n}": (torch.rand(shape, generator=generator) * 9).to(dtype)
        for key, dtype in DTYPES.items()
        for n, shape in enumerate([(), (0, 3), (1,), (3, 5, 7)])
    }
    save_file(tensors, tmp_path / SINGLE, metadata={"format": "pt"})
    for path in (tmp_path, tmp_path / SINGLE):
        weights = open_weights(path)
        assert weights.names() == sorted(tensors)
        assert weights.bytes == sum(t.numel() * t.element_size() for t in tensors.values())
        for name, expected in tensors.items():
            assert weights.meta(name) == (tuple(expected.shape), expected.dtype)
            actual = weights.read(name)
            assert actual.dtype == expected.dtype and actual.shape == expected.shape
            assert (
                actual.flatten().view(torch.uint8).tolist()
                == expected.flatten().view(torch.uint8).tolist()
            )


def test_reading_maps_the_file_and_copies_nothing(tmp_path: Path) -> None:
    save_file(
        {"a": torch.arange(1 << 20, dtype=torch.float32), "b": torch.ones(3)}, tmp_path / SINGLE
    )
    tensor = open_weights(tmp_path).read("a")
    maps = [
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(tmp_path / SINGLE))
    ]
    ranges = [[int(edge, 16) for edge in line.split()[0].split("-")] for line in maps]
    assert any(
        low <= tensor.data_ptr() and tensor.data_ptr() + tensor.nbytes <= high
        for low, high in ranges
    )


@pytest.mark.parametrize("pad", range(8))
def test_data_out_of_alignment_is_still_right(pad: int, tmp_path: Path) -> None:
    data = torch.tensor([1.5, -2.5])
    write(tmp_path, raw({"a": entry()}, data.numpy().tobytes(), pad))
    tensor = open_weights(tmp_path).read("a")
    assert torch.equal(tensor, data) and tensor.data_ptr() % 4 == 0


def test_shards(tmp_path: Path) -> None:
    sharded(
        tmp_path,
        {"a": "x.safetensors", "b": "y.safetensors"},
        x={"a": torch.ones(2)},
        y={"b": torch.zeros(3), "c": torch.ones(1)},
    )
    weights = open_weights(tmp_path)
    assert (
        weights.names() == ["a", "b", "c"] and weights.bytes == 24
    )  # a tensor the index forgot is a tensor still
    assert weights.read("b").tolist() == [0, 0, 0]


def test_shards_that_are_links_are_followed_as_in_the_hub_cache(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "blobs" / "123")
    (tmp_path / "snapshot" / "x.safetensors").symlink_to("../blobs/123")
    assert open_weights(sharded(tmp_path / "snapshot", {"a": "x.safetensors"})).read(
        "a"
    ).tolist() == [1, 1]


@pytest.mark.parametrize(
    "shard",
    [
        "../x.safetensors",
        "/etc/passwd",
        "..",
        ".",
        "",
        "sub/x.safetensors",
        "sub\\x",
        "C:x",
        "x\0",
        5,
        None,
    ],
)
def test_a_shard_outside_the_folder_is_refused(shard: object, tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    with pytest.raises(
        ModelError, match=r"'a' into .*; expected the name of a file in the same folder"
    ):
        open_weights(sharded(inside, {"a": shard}))


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "x.safetensors", "b": "gone.safetensors"}, "lacks the shard gone.safetensors"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, "tensor 'a' is in both x.safetensors and"),
        ({"a": "x.safetensors", "c": "x.safetensors"}, "x.safetensors has no tensor 'c'"),
        ({"b": "x.safetensors", "a": "z.safetensors"}, "x.safetensors has no tensor 'b'"),
        ({}, "has no 'weight_map'"),
    ],
)
def test_an_index_that_does_not_fit_its_shards(
    weight_map: dict[str, object], message: str, tmp_path: Path
) -> None:
    a, b = {"a": torch.ones(2)}, {"a": torch.ones(2), "b": torch.ones(1)}
    with pytest.raises(ModelError, match=re.escape(message)):
        open_weights(sharded(tmp_path, weight_map, x=a, y=b, z={"b": torch.ones(1)}))


BAD_INDEX = [
    b"",
    b"{",
    b"[]",
    b"5",
    b'{"weight_map": [1]}',
    b"[" * 100_000,
    b"\xff\xfe",
    b'{"weight_map": {}, "weight_map": {}}',
]


@pytest.mark.parametrize("content", BAD_INDEX)
def test_a_broken_index_is_named(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=re.escape(INDEX)):
        open_weights(write(tmp_path, content, INDEX).parent)


HUGE = 1 << 62
BROKEN = {
    "empty": (b"", "cut off"),
    "short": (b"\x01\x02", "cut off"),
    "pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid",
        "is a Git LFS pointer, expected a safetensors file; fetch the file itself with `git lfs",
    ),
    "page": (b"<!doctype html><html>", "is an HTML page"),
    "no_header": (raw(b"")[:8], "not JSON"),
    "no_json": (raw(b"nonsense"), "not JSON"),
    "long_header": ((1 << 40).to_bytes(8, "little") + b"{}", "cut off"),
    "array": (raw([1]), "a JSON list"),
    "deep": (raw(b"[" * 90_000), "not JSON"),
    "twice": (raw(b'{"a": 1, "a": 2}'), "appears twice"),
    "bytes": (raw(b'{"\xff": 1}'), "not JSON"),
    "no_entry": (raw({"a": 5}), "'a' is described by"),
    "dtype": (raw({"a": entry("F4", (2,), (0, 1))}, b"x"), "'a' has dtype 'F4'"),
    "complex": (raw({"a": entry("C64", (1,), (0, 8))}, bytes(8)), "'a' has dtype 'C64'"),
    "dtype_list": (raw({"a": entry(["F32"])}), "has dtype"),
    "negative": (raw({"a": entry("F32", (-2,))}, bytes(8)), "'a' has shape"),
    "float": (raw({"a": entry("F32", (2.0,))}, bytes(8)), "'a' has shape"),
    "bool": (raw({"a": entry("F32", (True, 2))}, bytes(8)), "'a' has shape"),
    "no_shape": (raw({"a": {"dtype": "F32"}}), "'a' has shape"),
    "reversed": (raw({"a": entry("F32", (2,), (8, 0))}, bytes(8)), "'a' has shape"),
    "one_offset": (raw({"a": entry("F32", (2,), (8,))}), "'a' has shape"),
    "size": (raw({"a": entry("F32", (3,))}, bytes(8)), "'a' takes 8 bytes; expected 12"),
    "overflow": (raw({"a": entry("F32", (HUGE, HUGE))}, bytes(8)), "'a' takes 8 bytes"),
    "truncated": (
        raw({"a": entry()}, bytes(7)),
        "cut off: tensor 'a' ends at byte 8, the data has 7",
    ),
    "extra": (raw({"a": entry()}, bytes(9)), "9 bytes of data"),
    "hole": (
        raw({"a": entry(), "b": entry("U8", (1,), (9, 10))}, bytes(10)),
        "'b' starts at byte 9 and leaves a hole",
    ),
    "first_hole": (raw({"a": entry("F32", (2,), (4, 12))}, bytes(12)), "leaves a hole"),
    "overlap": (
        raw({"a": entry(), "b": entry("U8", (8,), (4, 12))}, bytes(12)),
        "'b' starts at byte 4 and overlaps",
    ),
    "far": (raw({"a": entry("U8", (HUGE,), (0, HUGE))}, bytes(8)), "cut off"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    path = write(tmp_path, content)
    for where in (tmp_path, path):
        with pytest.raises(ModelError, match=re.escape(message)) as caught:
            open_weights(where)
        assert (
            str(path) in str(caught.value)
            and "\n" not in str(caught.value)
            and len(str(caught.value)) < 600
        )


def test_a_header_over_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtmd.kernels.checkpoint.safetensors_file.HEADER_BYTES_MAX", 100)
    with pytest.raises(ModelError, match=r"header of 14[0-9] bytes"):
        open_weights(write(tmp_path, raw({"a": entry()}, bytes(8), pad=83)))


def test_formats_that_are_not_loaded(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "zip.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "old.bin"):
        with pytest.raises(ModelError, match=rf"{name} is a pickle.*none is loaded"):
            open_weights(tmp_path / name)
    with pytest.raises(ModelError, match=r"model\.gguf is cut off"):
        open_weights(write(tmp_path, b"GGUF\x03\0\0\0", "model.gguf"))
    # The first bytes decide, not the name.
    (tmp_path / "zip.pt").rename(tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"cut off|not JSON"):
        open_weights(tmp_path)


def test_a_header_as_long_as_a_pickle_begins_is_no_pickle(tmp_path: Path) -> None:
    content = raw({"a": entry()}, bytes(8))
    length = 0x280  # little-endian: 80 02
    content = raw({"a": entry()}, bytes(8), pad=length - (len(content) - 16))
    assert content[:2] == b"\x80\x02"
    assert open_weights(write(tmp_path, content)).names() == ["a"]


def test_a_folder_around_a_checkpoint_is_told_the_checkpoint(tmp_path: Path) -> None:
    inner = tmp_path / "snapshots" / "abc"
    inner.mkdir(parents=True)
    write(inner, raw({"a": entry()}, bytes(8)))
    write(inner, b"{}", "config.json")
    with pytest.raises(ModelError, match=f"{INDEX}; did you mean '{inner}'\\?$"):
        open_weights(tmp_path)


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"has no weights: expected {SINGLE}"):
        open_weights(tmp_path)
    with pytest.raises(ModelError, match="nothing: found no such file, expected a checkpoint"):
        open_weights(tmp_path / "nothing")
    write(tmp_path, b"x", "pytorch_model.bin")
    with pytest.raises(
        ModelError,
        match=r"it has pytorch_model.bin, which this version does not load; load it with "
        r"transformers, and save it with save_pretrained\(folder, safe_serialization=True\)",
    ):
        open_weights(tmp_path)
    write(tmp_path, b"{}", "adapter_config.json")
    with pytest.raises(ModelError, match=r"is a LoRA adapter and no model; .*--lora"):
        open_weights(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / SINGLE)
    weights = open_weights(tmp_path)
    for call in (weights.read, weights.meta):
        with pytest.raises(ModelError, match="no tensor 'b'"):
            call("b")


def test_a_file_that_changes_after_it_was_opened(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / SINGLE)
    weights = open_weights(tmp_path)
    save_file({"a": torch.ones(5)}, tmp_path / SINGLE)
    with pytest.raises(ModelError, match=r"'a' is .* changed while it was open"):
        weights.read("a")


def test_mutated_files_give_a_typed_error_or_the_same_as_the_library(tmp_path: Path) -> None:
    random.seed(7)
    path = tmp_path / SINGLE
    save_file(
        {"a": torch.ones(2, 3), "b": torch.arange(4, dtype=torch.bfloat16), "c": torch.zeros(0)},
        path,
    )
    good = path.read_bytes()
    end = 8 + int.from_bytes(good[:8], "little")
    outcomes = {"error": 0, "read": 0}
    for n in range(600):
        data = bytearray(good)
        for _ in range(random.randrange(1, 4)):
            at = (
                random.randrange(end) if n % 3 else random.randrange(end, len(data) - 9)
            )  # header or data
            choice = random.randrange(4)
            if choice == 0:
                data[at] = random.randrange(256)
            elif choice == 1:
                data[at] = random.choice(b'0123456789[]{},:" ')
            elif choice == 2:
                del data[at : at + random.randrange(1, 9)]
            else:
                data[at:at] = bytes(random.choices(b'0123456789[]{},:"', k=random.randrange(1, 4)))
        path.unlink()  # a file that is mapped must not be cut short
        path.write_bytes(data)
        try:
            weights = open_weights(tmp_path)
            actual = {name: weights.read(name) for name in weights.names()}
        except ModelError as error:
            assert "\n" not in str(error)
            outcomes["error"] += 1
            continue
        outcomes["read"] += 1
        for name, expected in load_file(path).items():
            assert (actual[name].shape, actual[name].dtype) == (expected.shape, expected.dtype)
            assert (
                actual[name].flatten().view(torch.uint8).tolist()
                == expected.clone().flatten().view(torch.uint8).tolist()
            )
    assert outcomes["error"] > 200 and outcomes["read"] > 50
