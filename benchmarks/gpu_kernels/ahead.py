"""The programs that the other parts launch, compiled before, by several processes, into Triton's
cache on disk: a row for each op. No GPU is needed for it.
"""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any

from gpu_kernels import attention, matmul, paged
from gpu_kernels.rows import Row, Setting, Task, WrongError, first_line

ABSENT = "cuda:90"  # what a dry run compiles for
MAX_S = 86400
DRY = 1  # programs of an op, in a dry run
# Those that are measured first come first.
FIRST = ("attention", "paged_attention", "matmul")


def ops(setting: Setting) -> list[str]:
    from mtmd.kernels.gpu.table import KERNELS

    names = [*FIRST, *(op for op in KERNELS if op not in FIRST)]
    return [op for op in names if setting.op in (None, op)]


def programs(op: str, target: str) -> Iterator[Any]:
    """What cases, uses and timed problems of an op launch on a target."""
    from mtmd.kernels.gpu.table import KERNELS
    from mtmd.kernels.gpu.triton_kernel import node_of
    from mtmd.kernels.kernel import types_of

    for entry in KERNELS[op]:
        kernel = entry.load()
        for case in (*kernel.cases, *kernel.uses.values()):
            node = node_of(op, case)  # type: ignore[arg-type]
            yield from kernel.launched(*types_of(node), **node.attrs)
    timed = {"attention": attention, "paged_attention": paged, "matmul": matmul}
    if op in timed:
        yield from timed[op].programs(target)


@functools.cache
def different(op: str, target: str) -> list[Any]:
    from mtmd.kernels.gpu.compile import cache_key

    return list({cache_key(target, program): program for program in programs(op, target)}.values())


def compile_one(op: str, number: int, target: str) -> str | None:
    """In a process of its own: one program, and None or why it is not to be had."""
    from mtmd.kernels.gpu.ahead.compiling import compile_all

    try:
        compile_all(target, [different(op, target)[number]], threads=1)
    except Exception as fault:
        return first_line(fault)
    return None


def tasks(setting: Setting) -> Iterator[Task]:
    """All are begun with the first row."""
    target = target_of(setting)
    workers = max(1, cores() - 1)
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    begun: dict[str, list[Future[str | None]]] = {}
    names = ops(setting)

    def begin() -> None:
        for op in names if not begun else ():
            numbers = range(len(different(op, target)))
            chosen = numbers[:DRY] if setting.dry else numbers
            begun[op] = [pool.submit(compile_one, op, n, target) for n in chosen]

    try:
        for op in names:
            yield Task(op, functools.partial(_ended, op, begin, begun, setting))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _ended(
    op: str, begin: Any, begun: dict[str, list[Future[str | None]]], setting: Setting
) -> Row:
    start = time.monotonic()
    begin()
    jobs = begun[op]
    wait(jobs, None if setting.left_s() > MAX_S else max(setting.left_s(), 0))
    if slow := sum(not job.done() for job in jobs):
        raise WrongError(f"{slow} of {len(jobs)} programs are not compiled in time")
    result = [job.result() for job in jobs]
    if wrong := [text for text in result if text is not None]:
        raise WrongError(f"{len(wrong)} of {len(result)} programs: {'; '.join(wrong[:3])}")
    waited: dict[str, float | str] = {"op": op, "programs": len(result)}
    return Row(waited | {"waited s": time.monotonic() - start}, "Programs compiled ahead")


def target_of(setting: Setting) -> str:
    if setting.dry:
        return ABSENT
    from mtmd.kernels.backends.gpu import Gpu

    return str(Gpu(setting.device).target)


def cores() -> int:
    from mtmd.base.cores import usable_cores

    return int(usable_cores().usable)
