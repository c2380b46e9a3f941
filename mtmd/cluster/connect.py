"""A cluster found, within a time, and what it has."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from threading import Thread
from typing import Any

from mtmd.base.errors import DeviceError, OptionError
from mtmd.base.extras import install_command
from mtmd.base.text import one_line, plural
from mtmd.cluster.locations import identity, without_secrets
from mtmd.environment import guard_own_ray, keep_ray_quiet

LOCAL, AUTO = "local", "auto"
ANSWER_S = 10.0  # for a machine that is there
JOIN_S = 30.0  # for one at which Ray runs, perhaps busily
STORE_BYTES = 256 << 20  # of shared memory on this machine: lists of paths, and rows
MAX_CPUS = 8  # of an actor that computes on a GPU


@dataclass(frozen=True)
class PoolSize:
    """The number of actors, and what each takes of a machine; `threads` are those of each of its
    ranks.
    """

    actors: int
    cpus: int
    gpus: int
    threads: int

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


def check_address(address: str) -> None:
    """Raises OptionError for what can be none."""
    if address.startswith("ray://"):
        raise OptionError(
            f"ray: found {address:.100}, expected HOST:PORT: Ray's client protocol ends a job "
            "whose connection is lost for some seconds; run the command on a machine of the "
            "cluster, as `ray job submit` does, with --ray auto"
        )
    if address in (LOCAL, AUTO):
        return
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"\d{1,5}", port) or not 0 < int(port) < 65536:
        raise OptionError(
            f"ray: found {address!r:.100}, expected {LOCAL}, {AUTO}, or HOST:PORT of the head of a "
            "cluster, as `ray start --head` tells it"
        )


def import_ray(address: str) -> Any:
    """Set what Ray reads of the environment, and return Ray. Raises OptionError where it is
    missing.
    """
    keep_ray_quiet()
    if address == LOCAL:
        guard_own_ray()
    try:
        import ray
    except ImportError as error:
        raise OptionError(
            f"ray: found no Ray, which is an extra; run `{install_command('ray')}`"
        ) from error
    return ray


def import_serve(address: str) -> Any:
    """Ray Serve, as `import_ray`."""
    import_ray(address)
    try:
        from ray import serve
    except ImportError as error:
        raise OptionError(
            f"ray: found Ray without Ray Serve, which is an extra; run `{install_command('ray')}`"
        ) from error
    return serve


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Yield Ray, started here or joined. What runs there for this process ends with it. Raises
    OptionError and DeviceError.
    """
    check_address(address)
    ray = import_ray(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        if address == LOCAL:  # whose processes end with the thread that started them
            ray.init(LOCAL, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet)
        else:
            _join(ray, address, quiet)
        yield ray
    finally:
        ray.shutdown()


def _join(ray: Any, address: str, quiet: Mapping[str, Any]) -> None:
    """Join a cluster, within a time: Ray itself waits without end."""
    if address != AUTO:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()
        except OSError as error:
            reason = error.strerror or one_line(error) or type(error).__name__
            raise DeviceError(
                f"ray: {address} does not answer ({reason}), expected the head of a cluster; check "
                "the address, and that Ray runs there"
            ) from error
    failed: list[BaseException] = []

    def init() -> None:
        try:
            ray.init(address, **quiet)
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=init, name="mtmd ray", daemon=True)
    thread.start()
    thread.join(JOIN_S)
    if thread.is_alive() or failed:
        reason = (
            f"{one_line(failed[0], 300)}" if failed else f"no answer in Ray's way in {JOIN_S:.0f} s"
        )
        if failed and needs_token(failed[0]):
            raise DeviceError(
                f"ray: {address} wants a token; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH, as for Ray's own commands"
            ) from failed[0]
        where = "a cluster of this machine" if address == AUTO else address
        raise DeviceError(
            f"ray: {where} cannot be joined ({reason}); check the address, and that it runs the "
            f"same versions of Ray ({ray.__version__}) and Python"
        ) from (failed[0] if failed else None)


def needs_token(error: BaseException | None) -> bool:
    """Return whether a cluster was not joined for want of a token, which is among the causes."""
    while error is not None:
        if type(error).__name__ == "AuthenticationError" or "InvalidAuthToken" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def pool_size(
    nodes: Sequence[Mapping[str, float]],
    device: str = "auto",
    tp: int = 1,
    actors: int | None = None,
    threads: int | None = None,
) -> PoolSize:
    """Return the size of a pool on `nodes`, the resources of each as Ray has them. `actors` are as
    many as fit now where none are given. Raises OptionError where not one fits.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise OptionError(
            f"device: found {device!r}, expected auto, cpu or cuda: Ray says which GPU each actor "
            "has"
        )
    with_gpu = [node for node in nodes if node.get("GPU", 0) >= tp]
    if device == "cuda" or (device == "auto" and with_gpu):
        each = [int(node["GPU"]) // tp for node in with_gpu]
        free = [int(node.get("CPU", 0)) // n for node, n in zip(with_gpu, each, strict=True)]
        cpus = threads or max(1, min([*free, MAX_CPUS]))
        fit = sum(
            min(n, int(node.get("CPU", 0)) // cpus) for node, n in zip(with_gpu, each, strict=True)
        )
        return _checked(actors or fit, cpus, tp, cpus, f"{tp} GPUs and {cpus} CPUs", nodes)
    counts = [int(node.get("CPU", 0)) for node in nodes if node.get("CPU", 0) >= 1]
    minimum = min(counts, default=1)
    together = ceil(actors / max(len(counts), 1)) if actors else 1
    cpus = threads * tp if threads else max(1, minimum // together)
    fit = sum(count // cpus for count in counts)
    return _checked(actors or fit, cpus, 0, max(1, cpus // tp), f"{cpus} CPUs", nodes)


def _checked(
    actors: int, cpus: int, gpus: int, threads: int, what: str, nodes: Sequence[Mapping[str, float]]
) -> PoolSize:
    if not actors:
        raise OptionError(
            f"ray: found {describe(nodes)}, expected a machine with {what} for an actor; take "
            "fewer threads or a smaller tp, or give --actors N to wait for machines to come"
        )
    return PoolSize(actors, cpus, gpus, threads)


def describe(nodes: Sequence[Mapping[str, float]]) -> str:
    """Return what machines have, in words."""
    count = len(nodes)
    cpus, gpus = (sum(int(n.get(kind, 0)) for n in nodes) for kind in ("CPU", "GPU"))
    return f"{plural(count, 'machine')} with {cpus} CPUs and {gpus} GPUs"


def nodes(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each machine that is there."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


class _Owner:
    """Lives as long as the command that made it, as Ray has it of actors."""

    def __init__(self, name: str):
        self._name = name

    def name(self) -> str:
        return self._name


@contextmanager
def cluster_lock(ray: Any, out: str) -> Iterator[None]:
    """Keep other commands of the cluster from writing to `out`. Raises OptionError where one does.

    Commands of two clusters can write to one folder at the same time: they answer twice, and write
    once.
    """
    names = {"name": f"mtmd batch {identity(out)}", "namespace": "mtmd"}
    here = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
        ray.get_runtime_context().get_node_id(), soft=False
    )
    owner = ray.remote(_Owner).options(num_cpus=0, scheduling_strategy=here, **names)
    try:
        lock = owner.remote(f"process {os.getpid()} on {socket.gethostname()}")
    except ray.exceptions.ActorAlreadyExistsError as error:
        other = ray.get(ray.get_actor(**names).name.remote(), timeout=ANSWER_S)
        raise OptionError(
            f"out {without_secrets(out)}: found another command at work there ({other}), expected "
            "none: pictures would be answered twice; wait until it ends, end it, or name another "
            "folder"
        ) from error
    try:
        yield
    finally:
        ray.kill(lock)
