"""Damaged importance matrices and damaged sources of a conversion: each is read, or refused in one
line, with nothing large allocated.
"""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
import torch
from mutations import mutate_bytes
from mutations_gguf import mutate_gguf

from mtmd.base.errors import MtmdError
from mtmd.convert.convert import convert
from mtmd.convert.imatrix import read_imatrix
from mtmd.kernels.checkpoint.gguf_writer import write_gguf
from mtmd.kernels.checkpoint.tensor_writer import Planned
from mtmd.loading import DEMO_MODEL

MATRICES, SOURCES = 300, 15
PEAK_BYTES = 64 << 20


def matrix(path: Path) -> bytes:
    """A sound matrix of two tensors, one of experts, in the form that the name's end says."""
    sums = {"blk.0.ffn_up.weight": torch.rand(1, 48), "blk.0.ffn_up_exps.weight": torch.rand(3, 40)}
    if path.suffix == ".gguf":
        parts = []
        for name, values in sums.items():
            counts = torch.full((len(values), 1), 4.0)
            for end, tensor in ((".in_sum2", values), (".counts", counts)):
                parts.append(Planned(name + end, tuple(tensor.shape), "F32", lambda t=tensor: t))
        write_gguf(path, {"general.type": "imatrix", "imatrix.chunk_count": 4}, parts)
        return path.read_bytes()
    entries = [struct.pack("<i", len(sums))]
    for name, values in sums.items():
        head = struct.pack("<i", len(name)) + name.encode()
        entries.append(head + struct.pack("<ii", 4, values.numel()) + values.numpy().tobytes())
    return b"".join(entries)


@pytest.mark.parametrize("form", ["gguf", "dat"])
def test_importance_matrices(form: str, tmp_path: Path) -> None:
    path = tmp_path / f"matrix.{form}"
    sound, seen = matrix(path), Counter[str]()
    mutate = mutate_gguf if form == "gguf" else mutate_bytes

    def read_all() -> None:
        for seed in range(MATRICES):
            data, how = mutate(sound, random.Random(seed))
            path.write_bytes(data)
            try:
                entries = read_imatrix(path)
                assert all(bool(e.isfinite().all()) for e in entries.values()), (seed, how)
                seen["read"] += 1
            except MtmdError as error:
                assert len(str(error).splitlines()) == 1 and len(str(error)) < 600, (seed, how)
                seen["refused"] += 1
            except Exception as error:
                raise AssertionError(f"seed {seed}, {how}: {type(error).__name__}") from error

    tracemalloc.start()
    try:
        read_all()
        assert tracemalloc.get_traced_memory()[1] < PEAK_BYTES
    finally:
        tracemalloc.stop()
    assert min(seen["read"], seen["refused"]) > MATRICES // 20, seen


def test_sources_of_a_conversion(tmp_path: Path) -> None:
    """What a damaged GGUF is made of is refused before or while it is converted, and leaves no file
    under the name that was asked for.
    """
    (made,) = convert(DEMO_MODEL, tmp_path / "sound.gguf", to="Q8_0", text_only=True)
    sound, seen = made.path.read_bytes(), Counter[str]()
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    for seed in range(SOURCES):
        data, how = mutate_gguf(sound, random.Random(seed))
        source.write_bytes(data)
        try:
            convert(source, out, to="Q4_0", text_only=True)
            out.unlink()
            seen["converted"] += 1
        except MtmdError as error:
            assert len(str(error).splitlines()) == 1 and len(str(error)) < 600, (seed, how)
            assert not out.exists(), (seed, how)
            seen["refused"] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}, {how}: {type(error).__name__}: {error}") from error
        for left in tmp_path.glob(".*"):
            left.unlink()
    assert min(seen["converted"], seen["refused"]) > 1, seen
