"""Describes where ranks meet: a store of torch.distributed, of this machine's own or of the
launcher that has started all of them (torchrun).
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import is_torchelastic_launched
from torch.distributed.rendezvous import rendezvous

from mtmd.environment import Launched, stay_on_this_machine

LOCALHOST = "127.0.0.1"
KEY = "mtmd/ranks"


def new_store(size: int) -> Any:
    """Open a store on a free port of this machine."""
    stay_on_this_machine()
    return dist.TCPStore(  # type: ignore[attr-defined]
        LOCALHOST, 0, size, True, wait_for_workers=False
    )


def join_store(host: str, port: int, size: int) -> Any:
    stay_on_this_machine()
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, size, False
    )


def launcher_store(launched: Launched) -> Any:
    """The launcher's, which every process it has started joins."""
    url = f"tcp://{launched.address}:{launched.port}"
    rank, size = launched.rank, launched.size
    return next(iter(rendezvous("env://" if is_torchelastic_launched() else url, rank, size)))[0]


def transport(device: str) -> str:
    """torch.distributed's backend for ranks on such devices."""
    return "nccl" if device.startswith("cuda") else "gloo"
