"""The other ranks: a process that holds its part of the model and does what the first rank says,
until that ends.

    python -m mtmd.follower       # what the first rank writes to its standard input
"""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from mtmd.bench.shapes import random_checkpoint
from mtmd.checkpoint.checkpoint import RANDOM, Checkpoint
from mtmd.checkpoint.open import open_checkpoint
from mtmd.config import Launched, LoadOptions
from mtmd.kernels.errors import MtmdError
from mtmd.kernels.parallel.distributed import DistributedGroup
from mtmd.llm.batch import Batch
from mtmd.llm.state import Cache, Snapshot
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import run_checks
from mtmd.ranks.meeting import KEY, join_store, launcher_store, transport
from mtmd.ranks.wire import Head, Wire


class Follower:
    def __init__(self, loaded: LoadedModel, group: DistributedGroup, wire: Wire):
        self.loaded, self.group, self.wire = loaded, group, wire
        self.caches: dict[int, Cache] = {}
        self.snapshots: dict[int, Snapshot] = {}

    def follow(self, head: Head, tensors: list[Tensor]) -> None:
        for drop in head["drop"]:
            self.caches.pop(drop.get("cache"), None)
            self.snapshots.pop(drop.get("snapshot"), None)
        getattr(self, f"do_{head['kind']}")(head, tensors)

    def do_cache(self, head: Head, tensors: list[Tensor]) -> None:  # noqa: ARG002
        self.caches[head["number"]] = self.loaded.runner.new_cache()

    def do_clear(self, head: Head, tensors: list[Tensor]) -> None:  # noqa: ARG002
        self.caches[head["cache"]].clear(head["slot"])

    def do_snapshot(self, head: Head, tensors: list[Tensor]) -> None:  # noqa: ARG002
        self.snapshots[head["number"]] = self.caches[head["cache"]].snapshot(head["slot"])

    def do_restore(self, head: Head, tensors: list[Tensor]) -> None:  # noqa: ARG002
        self.caches[head["cache"]].restore(head["slot"], self.snapshots[head["number"]])

    def do_forward(self, head: Head, tensors: list[Tensor]) -> None:
        values: dict[str, Any] = {"images": None, "image_at": None}
        values |= dict(zip(head["names"], tensors, strict=True))
        batch = Batch(**values, answers=head["answers"], cache=self.caches[head["cache"]])
        runner = self.loaded.runner
        if not head["first"]:
            runner.forward(batch)
            return
        runner.prepare(batch.shape)
        self.wire.send("ready")
        with self.group.first_run():
            runner.forward(batch)

    def do_check(self, head: Head, tensors: list[Tensor]) -> None:  # noqa: ARG002
        with self.group.first_run():
            run_checks(self.loaded)

    def do_encode(self, head: Head, tensors: list[Tensor]) -> None:
        encoder, (pixels,) = self.loaded.encoder, tensors
        assert encoder is not None
        if not head["first"]:
            encoder.run(pixels)
            return
        encoder.prepare(pixels)
        self.wire.send("ready")
        with self.group.first_run():
            encoder.run(pixels)


def _open_again(how: str, *what: str | None) -> Checkpoint:
    """A checkpoint from what its `opened_from` says."""
    if how == RANDOM:
        shape, weights = what
        return random_checkpoint(str(shape), str(weights))
    model, *others = (None if f is None else Path(f) for f in what)
    assert model is not None
    return open_checkpoint(model, *others)


def follow(place: dict[str, Any], rank: int, store: Any = None) -> int:
    """Until the first rank ends this one, or is gone: then 0. 1 where something failed, which the
    first rank is told.
    """
    # Ctrl-C reaches all processes of a terminal: the first rank says when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    host, port = place["address"]
    wire = Wire(Client((host, port), authkey=bytes.fromhex(place["key"])))
    wire.send("here", rank=rank)
    try:
        head, _ = wire.receive()
        chosen = LoadOptions(**head["options"])
        host, port = place["store"] or ("", 0)
        store = store or join_store(host, port, place["size"])
        group = DistributedGroup(
            store, rank, place["size"], transport(chosen.device), place["memory"]
        )
        checkpoint = _open_again(*head["opened_from"])
        follower = Follower(LoadedModel(checkpoint, chosen, group=group), group, wire)
        wire.send("ready")
        while True:
            head, tensors = wire.receive()
            if head["kind"] == "end":
                group.leave()
                return 0
            with torch.inference_mode():
                follower.follow(head, tensors)
    except (EOFError, ConnectionError):
        return 0  # the first rank is gone
    except (MtmdError, RuntimeError, OSError, ValueError, MemoryError) as error:
        try:
            wire.send("error", text=f"has failed: {type(error).__name__}: {error}"[:1000])
        except OSError:
            return 0
        return 1


def join(launched: Launched) -> NoReturn:
    """Be one of the ranks that a launcher has started, not the first, and end."""
    store = launcher_store(launched)
    _end(follow(json.loads(bytes(store.get(KEY))), launched.rank, store))


def main() -> NoReturn:
    place = json.loads(sys.stdin.readline())
    _end(follow(place, place["rank"]))


def _end(code: int) -> NoReturn:
    """At once: threads of gloo that wait for ranks that are gone are not waited for, and are not
    met by an interpreter that is torn down.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
