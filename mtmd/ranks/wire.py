"""Describes what the first rank tells the others, and they it: a JSON head and tensors as raw
bytes. Nothing that is received is run.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtmd.kernels.dtype import DTYPES, name_of

Head = dict[str, Any]


class Wire:
    """One end of a connection between two ranks. Raises EOFError or OSError where the other has
    gone.
    """

    def __init__(self, connection: Connection):
        self.connection = connection

    def send(self, kind: str, tensors: Sequence[Tensor] = (), **head: Any) -> None:
        parts = [t.detach().cpu() for t in tensors]
        layout = [[name_of(p.dtype), list(p.shape)] for p in parts]
        self.connection.send_bytes(json.dumps({"kind": kind, "tensors": layout, **head}).encode())
        for part in parts:
            if part.numel():
                values = torch.empty(part.numel(), dtype=part.dtype).copy_(part.reshape(-1))
                self.connection.send_bytes(values.view(torch.uint8).numpy().tobytes())

    def receive(self) -> tuple[Head, list[Tensor]]:
        head = json.loads(self.connection.recv_bytes())
        tensors = []
        for kind, shape in head.pop("tensors"):
            value = torch.empty(shape, dtype=DTYPES[kind])
            if value.numel():
                data = np.frombuffer(self.connection.recv_bytes(), np.uint8)
                value.view(-1).view(torch.uint8).numpy()[:] = data
            tensors.append(value)
        return head, tensors

    def comes(self, seconds: float) -> bool:
        """Return whether there is something to receive, or the other's end, within so many
        seconds.
        """
        return self.connection.poll(seconds)

    @property
    def has_room(self) -> bool:
        """Return whether something short can be sent now, without waiting for the other to
        receive.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_WRITE)
            return bool(selector.select(0))

    def shut(self) -> None:
        """Shut it as if the other had gone, also for a thread of this process that sends or
        receives.
        """
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()
