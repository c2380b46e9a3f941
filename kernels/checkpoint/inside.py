"""A model's tensors inside of another's file, under the names that they have alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mtmd.kernels.checkpoint.canonical import Rearranged, WeightFile
from mtmd.kernels.graph import Shape


class Inside:
    """The tensors whose names begin with `prefix`, with `instead` in its place: a WeightFile."""

    canonical = False

    def __init__(self, file: WeightFile, prefix: str, instead: str = "") -> None:
        self._file = file
        self._sources = {
            instead + name.removeprefix(prefix): name
            for name in file.names()
            if name.startswith(prefix)
        }

    @property
    def files(self) -> Sequence[Path]:
        return self._file.files

    def names(self) -> list[str]:
        return sorted(self._sources)

    def meta(self, name: str) -> tuple[Shape, torch.dtype]:
        return self._file.meta(self._sources[name])

    def kind(self, name: str) -> str:
        return self._file.kind(self._sources[name])

    def stored_bytes(self, name: str) -> int:
        return self._file.stored_bytes(self._sources[name])

    def read(self, name: str) -> torch.Tensor:
        return self._file.read(self._sources[name])

    def rearranged(self, name: str, turned: bool) -> Rearranged | None:
        return self._file.rearranged(self._sources[name], turned)
