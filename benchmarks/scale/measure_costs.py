"""What a picture costs, stage by stage, for `scale_sim.py`: measured on the CPU at hand, or estimated
for a card that is not here.

    python benchmarks/scale/measure_costs.py cpu --out costs.json            the demo model, one actor, one thread
    python benchmarks/scale/measure_costs.py shape smolvlm-256m --out costs.json     random weights in a model's shape
    python benchmarks/scale/measure_costs.py card h100 smolvlm-256m --out costs.json     estimated, not run

`cpu` answers pictures in this process as an actor of `mtmd batch --ray` does, with a clock around
each stage that counts the processor's time of the thread it runs on; then a job of one actor on a
Ray of its own says what Ray itself takes. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools" / "demo_model")]
WARM = 2  # units before those that are measured
CLOCK = os.sysconf("SC_CLK_TCK")


class Clocks:
    """Seconds of the processor, and calls, by stage."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.steps: list[tuple[float, int, int]] = []
        """Of the decoder: seconds, sequences that wrote a token, tokens of prompts."""
        self._rows = (0, 0)

    def clear(self) -> None:
        self.seconds.clear()
        self.calls.clear()
        self.steps.clear()

    def around(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args, **options)
            finally:
                self.seconds[stage] += time.thread_time() - start
                self.calls[stage] += 1

        return timed

    @contextmanager
    def set(self) -> Iterator[None]:
        """Around the stages of an actor."""
        from mtmd.batch import answering
        from mtmd.llm.engine.engine import Engine
        from mtmd.service.encode_queue import EncodeQueue
        from mtmd.service.service import Service

        kept = [
            (answering, "read_picture", answering.read_picture),
            (Service, "load_image", Service.__dict__["load_image"]),
            (Service, "_prepare", Service._prepare),
            (Service, "_turn", Service._turn),
            (EncodeQueue, "step", EncodeQueue.step),
            (Engine, "step", Engine.step),
            (Engine, "_run", Engine._run),
        ]
        load_image: property = Service.__dict__["load_image"]
        run, step = Engine._run, Engine.step

        def counted_run(engine: Any, step: Any) -> Any:
            decoding = sum(sequence.decoding for sequence, _ in step.parts)
            read = sum(number for sequence, number in step.parts if not sequence.decoding)
            self._rows = decoding, read
            return run(engine, step)

        def counted_step(engine: Any) -> Any:
            self._rows, start = (0, 0), time.thread_time()
            found = step(engine)
            took = time.thread_time() - start
            self.seconds["step"] += took
            if any(self._rows):
                self.steps.append((took, *self._rows))
            return found

        setattr(answering, "read_picture", self.around("fetch", answering.read_picture))
        setattr(
            Service,
            "load_image",
            property(lambda service: self.around("decode", load_image.fget(service))),  # type: ignore[misc]
        )
        setattr(Service, "_prepare", self.around("preprocess", Service._prepare))
        setattr(Service, "_turn", self.around("turn", Service._turn))
        setattr(EncodeQueue, "step", self.around("encode", EncodeQueue.step))
        setattr(Engine, "_run", counted_run)
        setattr(Engine, "step", counted_step)
        try:
            yield
        finally:
            for owner, name, value in kept:
                setattr(owner, name, value)

    def step_costs(self) -> tuple[float, float, float]:
        """Seconds of a step, of a sequence in it that writes a token, of a token of a prompt: least
        squares, none below zero.
        """
        table = np.array(self.steps)
        found, wanted = np.zeros(3), [0, 1, 2]
        while wanted:
            columns = np.column_stack([np.ones(len(table)), table[:, 1], table[:, 2]])[:, wanted]
            solved = np.linalg.lstsq(columns, table[:, 0], rcond=None)[0]
            if (solved >= 0).all():
                found[wanted] = solved
                break
            wanted = [w for w, value in zip(wanted, solved, strict=True) if value >= 0]
        return float(found[0]), float(found[1]), float(found[2])


def in_this_process(pictures: int, unit: int, threads: int) -> dict[str, Any]:
    """An actor without Ray: costs, and the receipts' times."""
    from ray_batch import COUNT, draw_pictures

    from mtmd.cluster.places import Folder
    from mtmd.cluster.units import Item, Unit
    from mtmd.cluster.worker import Job, Loaded, Worker

    folder = Path(tempfile.mkdtemp(prefix="scale_costs"))
    clocks = Clocks()
    try:
        before, start = time.process_time(), time.perf_counter()
        worker = Worker(
            Job(
                str(folder / "rows.jsonl"),
                ".jsonl",
                COUNT,
                loading={"threads": threads, "device": "cpu"},
            )
        )
        loaded = worker.load()
        load_cpu, load = time.process_time() - before, time.perf_counter() - start
        assert isinstance(loaded, Loaded), loaded
        Folder(worker.job.out).make()
        (folder / "pictures").mkdir()
        count = pictures + WARM * unit
        names = sorted(draw_pictures(folder / "pictures", count))
        items = [Item(n, n, "file", str(folder / "pictures" / n)) for n in names]
        units = [
            Unit(k, tuple(items[at : at + unit])) for k, at in enumerate(range(0, count, unit))
        ]
        rows, write_s, found = 0, 0.0, []
        with clocks.set():
            for one in units:
                if one.number == WARM:
                    clocks.clear()
                    tiles = worker._model.service.encoding.tiles
                    batches = worker._model.service.encoding.batches
                    cpu, wall, rows, write_s, found = (
                        time.process_time(),
                        time.perf_counter(),
                        0,
                        0.0,
                        [],
                    )
                answered = worker._rows(one.items)
                at = time.thread_time()
                worker.write(one, answered)
                write_s += time.thread_time() - at
                rows += len(answered)
                found += [row for row in answered if row.error is None]
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        encoding = worker._model.service.encoding
        tiles, batches = encoding.tiles - tiles, encoding.batches - batches
        size = sum(p.stat().st_size for p in (folder / "pictures").iterdir()) / count
        row_bytes = sum(p.stat().st_size for p in Path(worker.job.out).iterdir()) / count
        worker.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = clocks.seconds
    step, output_token, prompt_token = clocks.step_costs()
    table = np.array(clocks.steps)
    read = sum(seconds[s] for s in ("fetch", "decode", "preprocess"))
    return {
        "pictures": rows,
        "load_cpu_s": load_cpu,
        "load_wall_s": load,
        "wall_s": wall,
        "cpu_s": cpu,
        "picture_bytes": size,
        "row_bytes": row_bytes,
        "fetch_s": seconds["fetch"] / rows,
        "decode_s": seconds["decode"] / rows,
        "preprocess_s": seconds["preprocess"] / rows,
        "request_s": (cpu - read - seconds["turn"] - write_s) / rows,
        "tiles": tiles / rows,
        "encode_batches": batches,
        "encode_tile_s": seconds["encode"] / tiles,
        "answer_s": (seconds["turn"] - seconds["encode"] - seconds["step"]) / rows,
        "step_s": step,
        "output_token_s": output_token,
        "prompt_token_s": prompt_token,
        "steps": len(table),
        "steps_s": seconds["step"],
        "prompt_tokens": float(table[:, 2].sum()) / rows,
        "output_tokens": 1 + float(table[:, 1].sum()) / rows,
        "write_unit_s": write_s / (len(units) - WARM),
        "receipts_ms": {
            name: float(np.mean([getattr(row, name) for row in found]))
            for name in ("queued_ms", "preprocess_ms", "encode_ms", "prefill_ms", "decode_ms")
        },
    }


if __name__ == "__main__":
    print(json.dumps(in_this_process(int(sys.argv[1]), 33, 1), indent=1))
