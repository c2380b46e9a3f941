"""Measurement of the machine that a model computes with, and of what slows it down."""

from __future__ import annotations

from functools import cache

import torch

from mtmd.base.cores import Cores, OthersWatch
from mtmd.base.throttling import ThrottleWatch
from mtmd.kernels.backends.backend import Backend
from mtmd.kernels.plan.free_memory import free_bytes
from mtmd.kernels.report.machine import MachineFacts, thread_report
from mtmd.kernels.report.measured_speeds import READ_BYTES, flops_rate_of, read_rate_of
from mtmd.kernels.report.warmup_report import WarmupReport
from mtmd.kernels.report.why_slow import encode_flops, step_bytes
from mtmd.kernels.resources.threads import requested_threads

ROOM = 2  # times what is read to find out how fast that goes, which has to be free


def machine_facts(
    backend: Backend,
    cores: Cores,
    threads: int,
    watch: OthersWatch | None,
    report: WarmupReport,
    throttling: ThrottleWatch | None = None,
) -> MachineFacts | None:
    """Return what `report` is to say of the machine, None where a GPU computes and nothing was run.
    `threads` of torch; `watch` has been looking since the checks of `report` began, None where
    there were none, and `throttling` as long.
    """
    throttled = throttling.throttled() if throttling is not None else None
    on_cpu = backend.device.type == "cpu"
    if not on_cpu and watch is None:
        return None
    others = watch.cores() if watch is not None and on_cpu else None
    alone = len(report.devices) == 1 and report.ranks is None and not report.elsewhere
    read = flops = None
    if alone and watch is not None and _has_room(backend):
        read = _read_rate(backend.name) if step_bytes(report) else None
        flops = _flops_rate(backend.name, report.dtype) if encode_flops(report) else None
    return MachineFacts(cores, threads if on_cpu else 1, others, read, flops, throttled)


def thread_warnings(backend: Backend, cores: Cores) -> tuple[str, ...]:
    """Return the warnings of receipts that more threads were requested than can run."""
    threads = requested_threads() or 0
    if backend.device.type != "cpu" or threads <= cores.usable:
        return ()
    return (
        f"{thread_report(threads, cores)}, and wait for each other: it takes longer than with "
        f"threads={cores.usable}",
    )


def computing_threads() -> int:
    """Return the number of torch's threads, in the thread that computes."""
    return requested_threads() or torch.get_num_threads()


def _has_room(backend: Backend) -> bool:
    free = free_bytes(backend)
    return free is not None and free > ROOM * READ_BYTES.get(backend.device.type, 0)


@cache
def _read_rate(device: str) -> float | None:
    return read_rate_of(device)


@cache
def _flops_rate(device: str, dtype: str) -> float | None:
    return flops_rate_of(device, dtype)
