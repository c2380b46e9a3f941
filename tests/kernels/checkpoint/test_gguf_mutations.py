"""Files with random damage: each opens, and then every tensor and key of it can be read, or raises
ModelError.
"""

from __future__ import annotations

import random
import resource
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter

from mtmd.base.errors import ModelError
from mtmd.kernels.checkpoint.gguf_file import GgufFile

MUTATIONS = 1000  # of each file
EXTREME = [
    0,
    1,
    2,
    3,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    1 << 20,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 32,
    1 << 40,
    1 << 61,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 32,
    (1 << 64) - 1,
]


def write(path: Path, plain: bool) -> None:
    """A small file: numbers and numeric keys, or blocks and strings."""
    writer, rng = GGUFWriter(path, "test"), np.random.default_rng(0)
    if plain:
        writer.add_uint32("test.block_count", 4)
        writer.add_float32("test.epsilon", 1e-6)
        writer.add_bool("test.bool", True)
        writer.add_array("test.sections", [1, 2, 3, 4])
        for number, dtype in enumerate((np.float32, np.float16, np.int8, np.int64)):
            writer.add_tensor(f"blk.{number}.weight", rng.integers(0, 9, (2, 3, 4)).astype(dtype))
    else:
        writer.add_custom_alignment(64)
        writer.add_array("tokenizer.ggml.tokens", [f"token {n}" for n in range(40)])
        writer.add_string("tokenizer.chat_template", "{{ messages }}")
        for kind, size in (
            (GGMLQuantizationType.Q8_0, 34),
            (GGMLQuantizationType.Q4_K, 144),
            (GGMLQuantizationType.BF16, 64),
        ):
            writer.add_tensor(
                f"{kind.name}.weight",
                rng.integers(0, 256, (3, size), dtype=np.uint8),
                raw_dtype=kind,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mutate(content: bytes, header: int, rng: random.Random) -> bytes:
    """One to three flips, truncations, or integers put over or between the header's bytes."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        at, kind = rng.randrange(min(header, len(data))), rng.randrange(8)
        if kind == 0:
            del data[max(rng.randrange(len(data)), 8) :]
        elif kind < 4:
            data[at] ^= 1 << rng.randrange(8) if kind < 3 else rng.randrange(1, 256)
        else:
            size = rng.choice((1, 4, 8))
            number = (rng.choice(EXTREME) & (1 << 8 * size) - 1).to_bytes(size, "little")
            data[at : at + (size if kind < 7 else 0)] = number
    return bytes(data)


def read_all(path: Path) -> None:
    file = GgufFile(path)
    for key in file.metadata:
        assert file.metadata[key] is not None
    for name in file.names():
        file.read(name)
    assert file.bytes <= path.stat().st_size


@pytest.mark.parametrize("plain", [True, False])
def test_damage_is_refused_or_harmless(plain: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write(path, plain)
    read_all(path)
    content, rng = path.read_bytes(), random.Random(int(plain))
    header = content.rindex(b".weight") + 40
    before, opened, messages = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0, set()
    for number in range(MUTATIONS):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(mutate(content, header, rng))
        try:
            read_all(path)
            opened += 1
        except ModelError as error:
            assert "\n" not in str(error) and path.name in str(error), error
            messages.add(str(error).split(path.name)[1][:14])
        path.unlink()
    assert (
        MUTATIONS // 20 < opened < MUTATIONS * 3 // 4 and len(messages) > 10
    )  # the damage reaches many checks, not all of it matters
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 1 << 30
