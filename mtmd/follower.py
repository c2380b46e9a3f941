"""The other ranks: a process that holds its part of the model and does what the first rank says,
until that ends.

    python -m mtmd.follower       # what the first rank writes to its standard input
"""

from __future__ import annotations

import json
import logging
import os
import sys
from contextlib import suppress
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from mtmd.base.errors import MtmdError
from mtmd.base.group_signals import outlive
from mtmd.base.heartbeat import Heartbeat, beat, waiting
from mtmd.base.text import plural
from mtmd.bench.shapes import random_checkpoint
from mtmd.checkpoint.adapters import with_adapters
from mtmd.checkpoint.checkpoint import RANDOM, Checkpoint
from mtmd.checkpoint.open import open_checkpoint
from mtmd.environment import Launched
from mtmd.kernels.parallel.distributed import DistributedGroup
from mtmd.llm.batch import Batch
from mtmd.llm.state import Cache, Snapshot
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.loaded.report import run_checks
from mtmd.options.load import LoadOptions
from mtmd.ranks.meeting import KEY, join_store, launcher_store, transport
from mtmd.ranks.signs import Signs
from mtmd.ranks.wire import Head, Wire

DOING = {"forward": "running a batch", "encode": "encoding", "check": "checking the model"}
log = logging.getLogger("mtmd.ranks")


class Follower:
    def __init__(self, loaded: LoadedModel, group: DistributedGroup, wire: Wire, signs: Signs):
        self.loaded, self.group, self.wire, self.signs = loaded, group, wire, signs
        self.caches: dict[int, Cache] = {}
        self.snapshots: dict[int, Snapshot] = {}

    def follow(self, head: Head, tensors: list[Tensor]) -> None:
        for drop in head["drop"]:
            self.caches.pop(drop.get("cache"), None)
            self.snapshots.pop(drop.get("snapshot"), None)
        with self.signs.work(DOING.get(head["kind"], "keeping its part of the cache")):
            getattr(self, f"do_{head['kind']}")(head, tensors)

    def _prepared(self, what: str) -> None:
        """Prepare the first run of a plan, which all begin together."""
        self.wire.send("ready")
        self.signs.doing = f"running {what} for the first time"

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
        for name, tensor in zip(head["names"], tensors, strict=True):
            values[name] = tensor if name in ("images", "context") else tensor.numpy()
        values |= {"answers": head["answers"], "adapters": tuple(head["adapters"])}
        batch = Batch(**values, cache=self.caches[head["cache"]])
        runner = self.loaded.runner
        if not head["first"]:
            runner.forward(batch)
            return
        what = f"a batch of {plural(batch.shape.tokens, 'token')}"
        self.signs.doing = f"preparing {what}"
        runner.prepare(batch.shape)
        self._prepared(what)
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
        what = f"tiles {list(pixels.shape)}"
        self.signs.doing = f"preparing {what}"
        encoder.prepare(pixels)
        self._prepared(what)
        with self.group.first_run():
            encoder.run(pixels)


def _open_again(how: str, *what: str | None) -> Checkpoint:
    """A checkpoint from what its `opened_from` says."""
    if how == RANDOM:
        shape, weights = what
        return random_checkpoint(str(shape), str(weights))
    model, projector, template = (None if f is None else Path(f) for f in what[:3])
    assert model is not None
    checkpoint = open_checkpoint(model, projector, template)
    return with_adapters(checkpoint, [text for text in what[3:] if text is not None])


def follow(location: dict[str, Any], rank: int, store: Any = None) -> int:
    """Until the first rank ends this one, or is gone: then 0. 1 where something failed, which the
    first rank is told.
    """
    outlive()  # the first rank says when to end
    (host, port), key = location["address"], bytes.fromhex(location["key"])
    try:
        wires = {kind: Wire(Client((host, port), authkey=key)) for kind in ("orders", "signs")}
        for kind, wire in wires.items():
            wire.send(kind, rank=rank)
    except (EOFError, ConnectionError):
        return 0  # the first rank is gone
    wire, heart = wires["orders"], Heartbeat()
    heart.count_this_thread()
    signs = Signs(wires["signs"], heart, lambda why: _leave(rank, why))
    try:
        head, _ = wire.receive()
        with signs.work("loading the model"):
            chosen = LoadOptions(**head["options"])
            host, port = location["store"] or ("", 0)
            store = store or join_store(host, port, location["size"])
            wire.send("here")
            with waiting():
                group = DistributedGroup(
                    store, rank, location["size"], transport(chosen.device), location["memory"]
                )
            checkpoint = _open_again(*head["opened_from"])
            beat("its graphs")
            loaded = LoadedModel(checkpoint, chosen, group=group)
            follower = Follower(loaded, group, wire, signs)
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


def _leave(rank: int, why: str | None) -> None:
    """Also in the midst of something that does not end."""
    if why is not None:
        log.error("rank %d %s; it ends", rank, why)
    _end(0 if why is None else 1)


def join(launched: Launched) -> NoReturn:
    """Be one of the ranks that a launcher has started, not the first, and end."""
    store = launcher_store(launched)
    _end(follow(json.loads(bytes(store.get(KEY))), launched.rank, store))


def main() -> NoReturn:
    line = sys.stdin.readline()
    if not line:
        _end(0)  # the first rank is gone
    location = json.loads(line)
    _end(follow(location, location["rank"]))


def _end(code: int) -> NoReturn:
    """End at once: threads of gloo that wait for ranks that are gone are not waited for, and are
    not met by an interpreter that is torn down.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
