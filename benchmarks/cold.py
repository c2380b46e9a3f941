"""Cold starts, each in a fresh process, alternating: from nothing to the first byte of an answer.

    python benchmarks/cold.py                             # the demo model against `import torch`
    python benchmarks/cold.py -m model.gguf -m other.gguf --llama-dir llama.cpp/build/bin
    python benchmarks/cold.py -m model.gguf --mmproj mmproj.gguf -i examples/shapes.png

Each model is asked with an empty cache of compiled programs and with a filled one. Seconds until
the first byte and until the process has ended, and CPU seconds of it and its children: medians, and
the best. With --stages, mtmd's share of them by stage, in one more process with a filled cache, and
one with an empty one.

llama.cpp (--llama-dir: the folder of `llama-completion`, built natively with
`cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON && cmake --build build -j`) gets the
same question, with its own chat template, as many threads, without its warm-up run.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PICTURE = Path(__file__).parents[1] / "examples" / "shapes.png"
QUESTION = "Say hi."
STAGES = """\
import time
marks = []
def mark(name):
    marks.append((name, time.perf_counter(), time.process_time()))
began = time.perf_counter()
from mtmd.base.garbage import without_collections
with without_collections():
    import torch
    mark("import torch")
    import mtmd.finding, mtmd.loading
    import mtmd.kernels.plan.native_run
    mark("import mtmd")
    from mtmd.model import Model
    from mtmd.options.by_name import options
    from mtmd.options.load import LoadOptions
    chosen = options(LoadOptions, {load})
    checkpoint, name = mtmd.finding.find_checkpoint({model!r}, chosen)
    mark("open files, make tokenizer")
    model = Model(checkpoint, chosen, name=name)
    mark("choose types, plan memory")
model.service
mark("engine, sampling")
receipt = model.answer({picture!r}, {question!r}, max_tokens=1).receipt
mark("first token")
model.answer({picture!r}, {question!r} + " Now.", max_tokens=2)
mark("second answer of 2 tokens")
wall, cpu = began, 0.0
for name, at, used in marks:
    print(f"    {{name:<28}} {{(at - wall) * 1e3:7.0f}} ms, CPU {{(used - cpu) * 1e3:7.0f}}")
    wall, cpu = at, used
from mtmd.kernels.cpu.native.compile import compiler
stats = compiler().stats
print(f"    in it: {{stats.kernels - stats.from_cache}} programs compiled in "
      f"{{stats.compile_ms:.0f}} ms, {{stats.from_cache}} from the cache, "
      f"loaded in {{stats.load_ms:.0f}} ms")
"""


@dataclass(frozen=True)
class Cold:
    """One start, in seconds."""

    first: float
    end: float
    cpu: float


def start(command: Sequence[str], more: Mapping[str, str]) -> Cold:
    """Run a command to its end. Raises RuntimeError with what it says where it fails."""
    before, began = _used(), time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, **more},
        )
        assert process.stdout is not None
        byte = os.read(process.stdout.fileno(), 1)
        first = time.perf_counter() - began
        process.stdout.read()
        if process.wait():
            errors.seek(0)
            raise RuntimeError(f"{command[0]}: {errors.read().decode(errors='replace')[-400:]}")
    end = time.perf_counter() - began
    return Cold(first if byte else end, end, _used() - before)


def _used() -> float:
    """CPU seconds of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def ask_command(model: str, args: argparse.Namespace) -> list[str]:
    """The command that asks mtmd."""
    command = [sys.executable, "-m", "mtmd", "ask", QUESTION, "-m", model]
    command += ["--max-tokens", "8", "--threads", str(args.threads), "--quiet"]
    if args.mmproj:
        command += ["--mmproj", args.mmproj]
    return command + (["-i", args.image] if args.image else [])


def of_llama(folder: Path, model: str, args: argparse.Namespace) -> list[str]:
    """The command that asks llama.cpp."""
    name = "llama-mtmd-cli" if args.image else "llama-completion"
    command = [str(folder / name), "-m", model, "-p", QUESTION, "-n", "8"]
    command += ["-t", str(args.threads), "--temp", "0", "--no-warmup", "-c", "2048"]
    if args.image:
        return [*command, "--mmproj", args.mmproj, "--image", args.image]
    return [*command, "--no-display-prompt", "-st", "--simple-io"]


def line(name: str, runs: Sequence[Cold]) -> str:
    columns = ([r.first for r in runs], [r.end for r in runs], [r.cpu for r in runs])
    values = "  ".join(f"{statistics.median(c):6.2f} ({min(c):5.2f})" for c in columns)
    return f"  {name:<28} {values}"


def machine() -> str:
    """The CPU by name, and how many of it this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [each.partition(":")[2].strip() for each in lines if each.startswith("model name")]
    return f"{len(os.sched_getaffinity(0))} x {names[0] if names else platform.machine()}"


def stages(model: str, args: argparse.Namespace, cache: str) -> None:
    load = {"threads": args.threads, **({"mmproj": args.mmproj} if args.mmproj else {})}
    code = STAGES.format(load=load, model=model, picture=args.image, question=QUESTION)
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "XDG_CACHE_HOME": cache}
    )


def measure(model: str, args: argparse.Namespace, cache: Path) -> None:
    """Print the figures of one model."""
    commands = {
        "mtmd, empty cache": ask_command(model, args),
        "mtmd, filled cache": ask_command(model, args),
    }
    if args.llama_dir:
        commands["llama.cpp"] = of_llama(args.llama_dir, model, args)
    filled = str(cache / "filled")
    for command in {tuple(command) for command in commands.values()}:
        start(command, {"XDG_CACHE_HOME": filled})  # files are in the page cache from here on
    runs: dict[str, list[Cold]] = {name: [] for name in commands}
    for number in range(args.n):
        for name, command in commands.items():
            where = str(cache / f"empty{number}") if "empty" in name else filled
            runs[name].append(start(command, {"XDG_CACHE_HOME": where}))
    print(f"{Path(model).name}: first byte, end, CPU seconds; medians of {args.n} (best)")
    for name, results in runs.items():
        print(line(name, results))
    if args.stages:
        for which, where in (("filled", filled), ("empty", str(cache / "stages"))):
            print(f"  stages, {which} cache", flush=True)
            stages(model, args, where)


def demo(args: argparse.Namespace) -> None:
    """Print the figures of the demo model, and their ratio to the import of torch."""
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "mtmd describe": [sys.executable, "-m", "mtmd", "describe", str(PICTURE)],
    }
    runs: dict[str, list[Cold]] = {name: [] for name in commands}
    for command in commands.values():
        start(command, {})
    for _ in range(args.n):
        for name, command in commands.items():
            runs[name].append(start(command, {}))
    print(f"the demo model: first byte, end, CPU seconds; medians of {args.n} (best)")
    for name, results in runs.items():
        print(line(name, results))
    median = {name: statistics.median(r.end for r in results) for name, results in runs.items()}
    print(f"ratio {median['mtmd describe'] / median['import torch']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", type=int, default=7, help="runs of each (default: %(default)s)")
    parser.add_argument("-m", "--model", action="append", default=[], help="a GGUF file or folder")
    parser.add_argument("--mmproj", help="the projector of the model")
    parser.add_argument("-i", "--image", help="a picture to ask about")
    parser.add_argument("--threads", type=int, default=2, help="of each (default: %(default)s)")
    parser.add_argument("--llama-dir", type=Path, help="folder of llama-completion")
    parser.add_argument("--stages", action="store_true", help="mtmd's time by stage as well")
    args = parser.parse_args()
    print(machine())
    if not args.model:
        demo(args)
    with tempfile.TemporaryDirectory() as folder:
        for number, model in enumerate(args.model):
            measure(model, args, Path(folder) / str(number))


if __name__ == "__main__":
    main()
