"""Files of tensors: written whole or not at all, gone on with where a run was cut off, and read back
by the gguf package.
"""

from __future__ import annotations

import errno
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import gguf
import pytest
import torch

from mtmd.base.errors import ModelError
from mtmd.base.file_lock import lock
from mtmd.kernels.checkpoint import tensor_writer
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.kernels.checkpoint.gguf_writer import write_gguf
from mtmd.kernels.checkpoint.tensor_writer import Planned
from mtmd.kernels.cpu.quantize import quantize

METADATA = {
    "general.architecture": "x",
    "count": 3,
    "large": 1 << 40,
    "negative": -4,
    "real": 0.5,
    "flag": True,
    "texts": ["a", "ü", "\udc80"],
    "numbers": [1, -2],
    "reals": [0.5, 1.0],
    "flags": [True, False],
    "none": [],
}
VALUES = torch.arange(512.0).view(2, 256)


def tensors(read=None):
    """Three tensors, of which the last is read by `read`."""
    rows = quantize(VALUES, "Q4_K")
    made = [
        Planned("odd", (3,), "F32", lambda: torch.tensor([1.0, 2.0, 3.0])),
        Planned("half", (2, 2), "F16", lambda: torch.ones(2, 2, dtype=torch.float16)),
        Planned("rows", (2, 256), "Q4_K", lambda: rows),
    ]
    return [*made[:2], replace(made[2], read=read)] if read else made


def test_what_was_written_is_read_back(tmp_path):
    path = tmp_path / "x.gguf"
    write_gguf(path, METADATA, tensors())
    file = GgufFile(path)
    assert {key: file.metadata[key] for key in file.metadata} == METADATA
    assert torch.equal(file.read("rows"), quantize(VALUES, "Q4_K"))
    assert torch.equal(file.read("odd"), torch.tensor([1.0, 2.0, 3.0]))
    copied = {key: file.metadata.raw(key) for key in file.metadata}
    write_gguf(tmp_path / "copy.gguf", copied, tensors())
    assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()
    reader = gguf.GGUFReader(path)
    assert [t.name for t in reader.tensors] == ["odd", "half", "rows"]
    assert reader.fields["numbers"].contents() == [1, -2]


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    def fails():
        raise KeyboardInterrupt

    path, reads, told = tmp_path / "x.gguf", [], []
    origin = tmp_path / "origin"
    origin.write_bytes(b"1")
    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, METADATA, tensors(fails), [origin])
    assert not path.exists() and len(list(tmp_path.iterdir())) == 2

    def counted(tensor):
        reads.append(tensor.name)
        return tensor.read()

    again = [replace(t, read=partial(counted, t)) for t in tensors()]
    write_gguf(path, METADATA, again, [origin], lambda *done: told.append(done))
    assert reads == ["rows"] and [name for name, *_ in told] == ["odd", "half", "rows"]
    assert told[-1][1] == told[-1][2] == path.stat().st_size
    whole = path.read_bytes()
    path.unlink()
    with pytest.raises(KeyboardInterrupt):
        write_gguf(path, METADATA, tensors(fails), [origin])
    origin.write_bytes(b"22")  # what it is made from has changed
    reads.clear()
    write_gguf(path, METADATA, again, [origin])
    assert reads == ["odd", "half", "rows"] and path.read_bytes() == whole
    assert sorted(tmp_path.iterdir()) == [origin, path]


def test_what_cannot_be_written(tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    with pytest.raises(ModelError, match="tensor rows has 4 bytes, expected 288"):
        write_gguf(path, METADATA, tensors(lambda: torch.zeros(1)))
    (part,) = tmp_path.iterdir()
    with part.open("r+b") as file:
        assert lock(file)
        with pytest.raises(ModelError, match="written by another process; wait for it"):
            write_gguf(path, METADATA, tensors())
    full = lambda _: SimpleNamespace(free=10)  # noqa: E731
    monkeypatch.setattr(tensor_writer.shutil, "disk_usage", full)
    with pytest.raises(OSError, match="0 MiB are free") as error:
        write_gguf(path, METADATA, tensors())
    assert error.value.errno == errno.ENOSPC and error.value.filename == str(path)
