"""What the first rank tells the others, and they it: a JSON head and tensors as raw bytes. Nothing
that is received is run.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtmd.kernels.dtype import DTYPES, name_of

Head = dict[str, Any]
TYPES = {**DTYPES, "i64": torch.int64, "i32": torch.int32}


class Wire:
    """One end of a connection between two ranks. Raises EOFError or OSError where the other has
    gone.
    """

    def __init__(self, connection: Connection):
        self._connection = connection

    def send(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> None:
        parts = [t.detach().cpu() for t in tensors]
        layout = [[name_of(p.dtype), list(p.shape)] for p in parts]
        self._connection.send_bytes(json.dumps({"kind": kind, "tensors": layout, **head}).encode())
        for part in parts:
            if part.numel():
                values = torch.empty(part.numel(), dtype=part.dtype).copy_(part.reshape(-1))
                self._connection.send_bytes(values.view(torch.uint8).numpy())

    def receive(self) -> tuple[Head, list[Tensor]]:
        head = json.loads(self._connection.recv_bytes())
        tensors = []
        for kind, shape in head.pop("tensors"):
            empty = torch.Size(shape).numel() == 0
            data = np.frombuffer(b"" if empty else self._connection.recv_bytes(), np.uint8).copy()
            tensors.append(torch.from_numpy(data).view(TYPES[kind]).view(shape))
        return head, tensors

    def close(self) -> None:
        self._connection.close()
