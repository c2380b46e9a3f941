"""Many programs compiled at once, into Triton's cache on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from triton.runtime.driver import driver

from mtmd.base.cores import usable_cores
from mtmd.kernels.gpu.compile import cache_key, compiled_for, parse_target
from mtmd.kernels.gpu.triton_kernel import Program

Progress = Callable[[int, int], None]


def compile_all(
    target: str, programs: Sequence[Program], progress: Progress | None = None, threads: int = 0
) -> list[Any]:
    """Triton's compiled kernels, in order, and each once: what lies in the cache is not compiled.
    `progress(done, all)` is called on this thread. Threads, 0 for one a processor: LLVM and
    NVIDIA's assembler, where the time goes, hold no interpreter lock.

    Raises PlacementError where the compiler refuses one.
    """
    result: dict[int, Any] = {}
    here = _is_here(target)
    with ThreadPoolExecutor(threads or usable_cores().usable) as pool:
        different = {cache_key(target, program): program for program in programs}
        jobs = {
            pool.submit(_ready, target, program, here): number
            for number, program in enumerate(different.values())
        }
        try:
            for done, job in enumerate(as_completed(jobs), 1):
                result[jobs[job]] = job.result()
                if progress is not None:
                    progress(done, len(jobs))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return [result[number] for number in sorted(result)]


def _ready(target: str, program: Program, here: bool) -> Any:
    compiled = compiled_for(target, program)
    if here:
        # Older versions of Triton have the system's C compiler make it, at a first launch.
        driver.active.launcher_cls(compiled.src, compiled.metadata)
    return compiled


def _is_here(target: str) -> bool:
    try:
        return bool(driver.active.get_current_target() == parse_target(target))
    except RuntimeError:  # Triton finds no device
        return False
