"""What a picture costs, stage by stage, for `scale_sim.py`.

    cd benchmarks/scale
    python measure_costs.py cpu --out costs/cpu-demo.json
    python measure_costs.py shape smolvlm-256m --out costs/cpu-smolvlm-256m.json
    python measure_costs.py card h100 smolvlm-256m --out costs/h100-smolvlm-256m.json

`cpu` answers pictures in this process as an actor of `mtmd batch --ray` does, with clocks around
its stages; then a job of one actor, on a Ray of its own, says what Ray takes beside. `shape` asks
`mtmd bench` for the stages of a model, `card` asks `mtmd warmup --target`, whose formulas are in
docs/gpu.md; both take what the host does for any picture from `--host`, which was measured.
Nothing else should run on the machine meanwhile: the engine's stages are measured by the clock.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from scenario import ESTIMATED, MEASURED, Costs

from mtmd.base.errors import MtmdError

ROOT = Path(__file__).parents[2]
COSTS = Path(__file__).parent / "costs"
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "tools" / "demo_model")]
WARM = 2  # units before those that are measured
UNIT = 33
CLOCK = os.sysconf("SC_CLK_TCK")
STEP_TOKENS, ALONGSIDE_TOKENS = 512, 128  # llm/engine/runner.py, scheduler.py
OUTPUT_TOKENS = 64.0  # of an answer, where no answers are written: an assumption


class Clocks:
    """Seconds by stage: of the processor, for the thread that works, and of the clock."""

    def __init__(self) -> None:
        self.cpu: defaultdict[str, float] = defaultdict(float)
        self.wall: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.steps: list[tuple[float, int, int]] = []
        """Of the decoder: seconds, sequences that wrote a token, tokens of prompts."""
        self.batches: list[tuple[float, int]] = []
        """Of the encoder: seconds, tiles."""

    def clear(self) -> None:
        for saved in (self.cpu, self.wall, self.calls, self.steps, self.batches):
            saved.clear()

    def around(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            cpu, wall = time.thread_time(), time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                self.cpu[stage] += time.thread_time() - cpu
                self.wall[stage] += time.perf_counter() - wall
                self.calls[stage] += 1

        return timed

    @contextmanager
    def set(self) -> Iterator[None]:
        """Around the stages of an actor."""
        from mtmd.batch import answering
        from mtmd.cluster import worker
        from mtmd.llm.engine.engine import Engine
        from mtmd.service.encode_queue import EncodeQueue
        from mtmd.service.request_maker import RequestMaker
        from mtmd.service.run_loop import RunLoop
        from mtmd.service.service import Service

        encode, run, step = EncodeQueue.step, Engine._run, Engine.step
        load_image: Any = Service.__dict__["load_image"]
        rows, spent = [0, 0], [0.0]

        def encoded(queue: Any, *given: Any) -> Any:
            before, start = (queue.batches, queue.tiles), time.perf_counter()
            result = encode(queue, *given)
            spent[0] += time.perf_counter() - start
            if queue.batches > before[0]:
                self.batches.append((spent[0], queue.tiles - before[1]))
                spent[0] = 0.0
            return result

        def counted(engine: Any, one: Any) -> Any:
            rows[0] = sum(sequence.decoding for sequence, _ in one.parts)
            rows[1] = sum(number for sequence, number in one.parts if not sequence.decoding)
            return run(engine, one)

        def stepped(engine: Any) -> Any:
            rows[:], start = (0, 0), time.perf_counter()
            result = step(engine)
            if any(rows):
                self.steps.append((time.perf_counter() - start, *rows))
            return result

        changed = (
            (answering, "read_picture", self.around("fetch", answering.read_picture)),
            (Service, "load_image", property(lambda s: self.around("decode", load_image.fget(s)))),
            (RequestMaker, "prepare", self.around("preprocess", RequestMaker.prepare)),
            (RunLoop, "turn", self.around("turn", RunLoop.turn)),
            (EncodeQueue, "step", encoded),
            (Engine, "_run", counted),
            (Engine, "step", stepped),
            (worker, "write_part", self.around("write", worker.write_part)),
        )
        saved = [(owner, name, owner.__dict__[name]) for owner, name, _ in changed]
        for owner, name, value in changed:
            setattr(owner, name, value)
        try:
            yield
        finally:
            for owner, name, value in saved:
                setattr(owner, name, value)


def line(rows: list[Any]) -> list[float]:
    """Of rows (seconds, counts...): seconds of a call, and of one of each count, by least squares,
    none below zero. The slowest twentieth, which something else held up, is left out.
    """
    table = np.array(sorted(rows)[: max(1, len(rows) * 19 // 20)], float)
    columns = np.column_stack([np.ones(len(table)), table[:, 1:]])
    result, requested = np.zeros(columns.shape[1]), list(range(columns.shape[1]))
    while requested:
        solved = np.linalg.lstsq(columns[:, requested], table[:, 0], rcond=None)[0]
        if (solved >= 0).all():
            result[requested] = solved
            break
        requested = [w for w, value in zip(requested, solved, strict=True) if value >= 0]
    # what was left out happened, too
    whole = np.array(rows, float)
    fitted = np.column_stack([np.ones(len(whole)), whole[:, 1:]]) @ result
    return [float(v) for v in result * (whole[:, 0].sum() / max(fitted.sum(), 1e-12))]


@contextmanager
def pictures(count: int) -> Iterator[Path]:
    """A folder with `pictures` in it, and room for rows."""
    from ray_batch import draw_pictures

    folder = Path(tempfile.mkdtemp(prefix="scale_costs"))
    try:
        (folder / "pictures").mkdir()
        draw_pictures(folder / "pictures", count)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def actor(count: int) -> tuple[dict[str, float], dict[str, Any]]:
    """Costs of an actor without Ray, one thread; and facts beside."""
    from ray_batch import COUNT

    from mtmd.cluster.manifest import Item, Unit
    from mtmd.cluster.out.folder import Folder
    from mtmd.cluster.schedule import UNITS_PER_ACTOR
    from mtmd.cluster.worker import Job, Loaded, Worker, Written

    clocks = Clocks()
    unseen = 200
    with pictures(count + WARM * UNIT + unseen) as folder:
        out, cpu, wall = str(folder / "rows.jsonl"), time.process_time(), time.perf_counter()
        worker = Worker(Job(out, ".jsonl", COUNT, loading={"threads": 1, "device": "cpu"}))
        loaded = worker.load()
        assert isinstance(loaded, Loaded), loaded
        # the interpreter's start, too
        load_cpu, load_wall = time.process_time(), time.perf_counter() - wall
        load_wait = max(load_wall - (time.process_time() - cpu), 0.0)
        Folder(out).make()
        every = sorted((folder / "pictures").iterdir())
        files = every[:-unseen]
        items = [Item(f.name, f.name, "file", str(f)) for f in files]
        units = [
            Unit(n, tuple(items[at : at + UNIT])) for n, at in enumerate(range(0, len(items), UNIT))
        ]
        with clocks.set(), ThreadPoolExecutor(UNITS_PER_ACTOR) as pool:
            list(pool.map(worker.run, units[:WARM]))
            clocks.clear()
            cpu, wall = time.process_time(), time.perf_counter()
            done = list(pool.map(worker.run, units[WARM:]))
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        rows = sum(one.rows for one in done if isinstance(one, Written))
        assert rows == count, done
        locked = locked_part(worker, [str(f) for f in every[-unseen:]])
        picture_bytes = sum(f.stat().st_size for f in files) / len(files)
        worker.close()
    used, taken = clocks.cpu, clocks.wall
    tiles = sum(number for _, number in clocks.batches)
    batch_s, tile_s = line(clocks.batches)
    step_s, output_s, prompt_s = line(clocks.steps)
    engine = sum(s for s, _ in clocks.batches) + sum(s for s, *_ in clocks.steps)
    host = {stage: used[stage] / rows for stage in ("fetch", "decode", "preprocess")}
    costs = {f"{stage}_s": seconds for stage, seconds in host.items()} | {
        "picture_bytes": picture_bytes,
        "request_s": (cpu - used["turn"] - used["write"]) / rows - sum(host.values()),
        "locked": locked,
        "engine_cores": used["turn"] / taken["turn"],
        "tiles": tiles / rows,
        "encode_batch_s": batch_s,
        "encode_tile_s": tile_s,
        "prompt_tokens": sum(read for _, _, read in clocks.steps) / rows,
        "output_tokens": 1 + sum(wrote for _, wrote, _ in clocks.steps) / rows,
        "step_s": step_s,
        "prompt_token_s": prompt_s,
        "output_token_s": output_s,
        "answer_s": (taken["turn"] - engine) / rows,
        "write_s": used["write"] / clocks.calls["write"],
        "load_cpu_s": load_cpu,
        "load_wait_s": load_wait,
    }
    facts = {
        "pictures_s": rows / wall,
        "cpu_s_a_picture": cpu / rows,
        "tiles_a_batch": tiles / len(clocks.batches),
        "steps_a_picture": len(clocks.steps) / rows,
    }
    return costs, facts


def locked_part(worker: Any, paths: list[str]) -> float:
    """Of the host's work on a picture, what two threads cannot do at the same time: by how much
    faster two are than one (Amdahl's law).
    """
    from mtmd.prompt.conversation import messages_of
    from mtmd.prompt.load_image import read_picture
    from mtmd.service.prompt_scores import PromptScores

    service = worker._model.service
    settings = service._loaded.answer_options({})

    def prepare(path: str) -> None:
        data = read_picture(Path(path))
        shown = service.load_image(data, unnamed=path)
        messages = messages_of(shown, worker.job.prompt, "")
        no_plan, no_end = (lambda: None), (lambda _: None)
        service._maker.prepare(messages, settings, "", no_plan, PromptScores(), no_end)

    seconds = []
    for threads in (1, 2, 1, 2):
        with ThreadPoolExecutor(threads) as pool:
            start = time.perf_counter()
            list(pool.map(prepare, paths))
            seconds.append(time.perf_counter() - start)
    one, two = min(seconds[::2]), min(seconds[1::2])
    return float(np.clip(2 * two / one - 1, 0, 1))


def ray_alongside(count: int) -> tuple[dict[str, float], dict[str, Any]]:
    """What Ray and the command take beside one actor: seconds for a unit, and cores all the time;
    and the actor's own numbers.
    """
    from ray_batch import COUNT, below

    with pictures(count) as folder:
        out = folder / "rows.jsonl"
        command = [sys.executable, "-m", "mtmd.cli", "batch", str(folder / "pictures"), "-p", COUNT]
        command += ["--ray", "local", "--actors", "1", "--threads", "1", "--unit", str(UNIT)]
        process = subprocess.Popen([*command, "--out", str(out)], stderr=subprocess.PIPE, text=True)
        seen: list[tuple[float, int, Counter[str]]] = []
        by_process: dict[int, tuple[str, float]] = {}
        while process.poll() is None:
            time.sleep(0.5)
            units = len(list(out.glob("part-*"))) if out.exists() else 0
            for pid in below(process.pid):
                by_process[pid] = _used(pid, process.pid, *by_process.get(pid, ("", 0.0)))
            used: Counter[str] = Counter()
            for role, seconds in by_process.values():
                used[role] += seconds
            if WARM < units < count // UNIT:
                seen.append((time.monotonic(), units, used))
        reported = process.stderr.read().strip().splitlines()[-1] if process.stderr else ""
    result = re.search(r"([\d.]+) images/s", reported)
    if result is None or len(seen) < 2 or seen[0][1] == seen[-1][1]:
        raise SystemExit(f"the job of one actor did not go as expected: {reported[:300]}")
    (start, first, before), (end, last, after) = seen[0], seen[-1]
    units, seconds = last - first, end - start
    costs = {
        "assign_s": (after["command"] - before["command"]) / units,
        "background_cores": (after["ray"] - before["ray"]) / seconds,
    }
    facts = {
        "pictures_s": float(result[1]),
        "cpu_s_a_picture": (after["actor"] - before["actor"]) / units / UNIT,
    }
    return costs, facts


def _used(pid: int, command: int, role: str, before: float) -> tuple[str, float]:
    """What a process is, and the seconds of the processor that it has taken; as they were `before`
    where it has ended.
    """
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return role or "ray", before
    actor = "actor" if title.startswith("ray::Worker") else "ray"
    return "command" if pid == command else actor, max(cpu_s(pid), before)


def cpu_s(pid: int) -> float:
    """Seconds of the processor that a process has taken, 0 where it has ended: proc_pid_stat(5),
    utime and stime.
    """
    try:
        numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(numbers[11]) + int(numbers[12])) / CLOCK


def measured_cpu(args: argparse.Namespace) -> Costs:
    costs, alone = actor(args.pictures)
    alongside, ray = ray_alongside(args.pictures)
    for name, facts in (("in this process", alone), ("one actor of Ray", ray)):
        reported = ", ".join(f"{what} {value:.4g}" for what, value in facts.items())
        print(f"{name}: {reported}", file=sys.stderr)
    return Costs(
        name="demo model, CPU, one thread",
        kind=MEASURED,
        how=f"measure_costs.py cpu --pictures {args.pictures}",
        machine=f"{os.cpu_count()} cores, {platform.machine()}",
        device="cpu",
        tiles_at_once=4,
        step_tokens=STEP_TOKENS,
        concurrent_tokens=ALONGSIDE_TOKENS,
        **costs,
        **alongside,
    )


def mtmd(*words: str) -> dict[str, Any]:
    """What a command of ours prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "mtmd", *words, "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in (0, 3):
        raise SystemExit(f"mtmd {' '.join(words)}: {done.stderr.strip()[-300:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def jpeg(side: int) -> bytes:
    """A picture with something everywhere, as photos have."""
    from PIL import Image

    rng = np.random.default_rng(1)
    coarse = rng.integers(0, 256, (side // 16, side // 16, 3), np.uint8)
    image = Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC)
    fine = np.asarray(image).astype(np.int16) + rng.integers(-8, 9, (side, side, 3))
    file = io.BytesIO()
    Image.fromarray(fine.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode_s(data: bytes) -> float:
    from mtmd.prompt.load_image import load_image

    seconds = []
    for _ in range(7):
        start = time.perf_counter()
        load_image(data, unnamed="picture.jpg")
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def measured_shape(args: argparse.Namespace) -> Costs:
    """Of `mtmd bench`: the middle time of each stage."""
    host = Costs.read(args.host)
    words = ["bench", "--random-weights", args.shape, "--resolution", str(args.side)]
    words += ["--threads", str(args.threads), "--batch", "1,4", "--context", "32", "--no-ops"]
    words += ["--rounds", "3", "--decode", "8", "--stages", "preprocess,encode,prefill,decode"]
    result = mtmd(*words)
    stages = {(s["name"], s["point"]["batch"]): s for s in result["stages"]}
    one, four = (stages["decode", n]["median_ms"] / 1e3 for n in (1, 4))
    prefill, data = stages["prefill", 1], jpeg(args.side)
    each, preprocess_s = max((four - one) / 3, 0.0), stages["preprocess", 1]["median_ms"] / 1e3
    decoding_s = decode_s(data)
    on_host = host.fetch_s + host.request_s + decoding_s + preprocess_s
    return replace(
        host,
        name=f"{args.shape}, CPU, {args.threads} threads",
        how=f"measure_costs.py shape {args.shape}: mtmd {' '.join(words)}",
        engine_cores=float(args.threads),
        picture_bytes=float(len(data)),
        decode_s=decoding_s,
        preprocess_s=preprocess_s,
        locked=min(host.locked * host.host_s / on_host, 1.0),  # as many seconds
        tiles=1.0,
        tiles_at_once=1,
        encode_batch_s=0.0,
        encode_tile_s=stages["encode", 1]["median_ms"] / 1e3,
        prompt_tokens=float(prefill["tokens"]),
        output_tokens=OUTPUT_TOKENS,
        step_s=one - each,
        output_token_s=each,
        prompt_token_s=prefill["median_ms"] / 1e3 / prefill["tokens"],
        notes=f"a JPEG of {args.side} x {args.side} pixels; {OUTPUT_TOKENS:g} tokens of an answer "
        "are an assumption; what the host does for a request, and to load: the demo model's",
    )


def estimated_card(args: argparse.Namespace) -> Costs:
    """Of `mtmd warmup --target`: middle estimates."""
    host = Costs.read(args.host)
    words = ["warmup", "--target", args.card, "--random-weights", args.shape]
    words += ["--parallel", str(args.slots)]
    result = mtmd(*words)
    near = min(result["lengths"], key=lambda one: abs(one["context"] - host.prompt_tokens))
    picture = next(p for p in result["pictures"] if p["size"][0] == p["size"][1])
    one, all_ = near["decode"]["ms"] / 1e3, near["decode_all"]["ms"] / 1e3
    each = max((all_ - one) / (result["sequences"] - 1), 0.0)
    read = max(near["prefill"]["ms"] / 1e3 - one, 0.0) / near["prefill_tokens"]
    return replace(
        host,
        name=f"{args.shape}, {result['card']['title']}",
        kind=ESTIMATED,
        how=f"measure_costs.py card {args.card} {args.shape}: mtmd {' '.join(words)}",
        machine=f"engine: {result['card']['source']}; host: {host.machine}",
        device="gpu",
        engine_cores=1.0,
        tiles=1.0,
        tiles_at_once=1,
        encode_batch_s=0.0,
        encode_tile_s=picture["encode"]["ms"] / 1e3,
        step_s=one - each,
        output_token_s=each,
        prompt_token_s=read,
        concurrent_tokens=STEP_TOKENS,
        answer_s=host.answer_s,
        background_cores=0.0,
        notes=f"a square picture of {picture['tokens']} tokens; what the host does: {host.name}",
    )


def main() -> None:
    doc = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=doc[0], epilog=doc[2], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = parser.add_subparsers(dest="way", required=True)
    cpu = ways.add_parser("cpu", help="measured: the demo model, with Ray")
    cpu.add_argument("--pictures", type=int, default=660)
    shape = ways.add_parser("shape", help="measured: random weights in a model's shape")
    shape.add_argument("--threads", type=int, default=os.cpu_count())
    shape.add_argument("--side", type=int, default=512, help="of the square picture, in pixels")
    card = ways.add_parser("card", help="estimated: a GPU that is not here")
    card.add_argument("card", help="as mtmd warmup --target list")
    card.add_argument("--slots", type=int, default=16, help="answers at once")
    for way, host in ((shape, "cpu-demo"), (card, "cpu-smolvlm-256m")):
        way.add_argument("shape", help="a model's, as mtmd bench --random-weights list")
        way.add_argument("--host", type=Path, default=COSTS / f"{host}.json")
    for way in (cpu, shape, card):
        way.add_argument("--out", type=Path, required=True, help="a .json file")
    args = parser.parse_args()
    try:
        result = {"cpu": measured_cpu, "shape": measured_shape, "card": estimated_card}[args.way](
            args
        )
    except MtmdError as error:
        parser.error(str(error))
    values = {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in asdict(result).items()
    }
    args.out.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
