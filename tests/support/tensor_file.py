"""A weight file in memory."""

from __future__ import annotations

import torch


class TensorFile:
    """fp32 tensors by name, as a `WeightFile`; `canonical`: under the names and in the layout of
    GGUF.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], canonical: bool = False):
        self.tensors, self.canonical = tensors, canonical

    def names(self) -> list[str]:
        return list(self.tensors)

    def meta(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        return tuple(self.tensors[name].shape), self.tensors[name].dtype

    def kind(self, name: str) -> str:  # noqa: ARG002
        return "F32"

    def stored_bytes(self, name: str) -> int:
        return self.tensors[name].nbytes

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    def rearranged(self, name: str, turned: bool) -> None:  # noqa: ARG002
        return None
