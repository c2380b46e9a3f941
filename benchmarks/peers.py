"""The same work through this project and through whatever peers are installed, alternating in one
run: encode one 512 px tile and one of 896 px, read a prompt of 256 tokens,
decode 64 after it.

    python benchmarks/peers.py                              all types, two threads
    python benchmarks/peers.py --stage encode               pictures alone
    python benchmarks/peers.py --types Q4_0 --load 0,1      also beside a busy core
    python benchmarks/peers.py --types BF16,Q4_0 --context 256,4096 --batch 1,16
    python benchmarks/peers.py --types Q4_0 --batch 1,16 --servers     mtmd serve, llama-server
    python benchmarks/peers.py --types Q4_0,Q8_0 --shape smollm2-1.7b
    python benchmarks/peers.py --llama-dir ~/llama.cpp/build/bin
    python benchmarks/peers.py --types Q4_0,Q8_0 --openvino ~/openvino/bin/python
    python benchmarks/peers.py --types Q4_0 --dtype fp32 --int8      also with --activations int8
    python benchmarks/peers.py --stage encode --dtype fp32 --int8 --openvino ~/openvino/bin/python

--context are the tokens read before those that are decoded, --batch the sequences that decode at
once; the first of each is the base, from which the others are varied one at a time. Peers:
llama-bench, llama-batched-bench (several sequences) and llama-mtmd-cli, on PATH or in --llama-dir,
and at the base the llama-cpp-python package, transformers, and OpenVINO GenAI, which has a Python
of its own (--openvino), reads the same GGUF files, and encodes with what it makes of transformers'
tower, in bfloat16, or with --int8 in 8 bits. Build llama.cpp for this machine, or it is slower
than it can be:

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON
    cmake --build build -j --target llama-bench llama-batched-bench llama-mtmd-cli llama-server
    python -m venv ~/openvino && ~/openvino/bin/pip install openvino-genai

The machine and everybody's version are printed before the numbers. --servers asks `mtmd serve` and
llama-server, with as many slots, for the largest batch of answers at once: all of their tokens by
the time from the first request to the last answer, prompts included, in the second such round.
The models have random weights and SmolVLM-256M's shape, or for text another of `mtmd bench
--random-weights list` whose decoder is a llama's or qwen3's, written here as GGUF by the gguf
package; --folder keeps them. The tile of 896 px goes through the tower of Gemma 3's shape, with
transformers beside it. Every measurement is a process of its own, so that no library's threads are
in another's way. Ratios above 1 say that this project is faster; the share is that of what the
machine reads and computes at most, measured in the same run. Of an encode, the memory beside the
weights at its peak is told, too, and the peak of the process from its start through the first
encode, libraries and weights included, where Linux does.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import shutil
import socket
import statistics
import string
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SHAPE, TILE, DECODE = "smolvlm-256m", 512, 64
TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")
PROJECTOR, TOWER = "mmproj-BF16", "tower-BF16"
STAGES = {"encode": (PROJECTOR, TOWER), "text": TYPES}
ENCODES = {PROJECTOR: (SHAPE, TILE), TOWER: ("gemma-3-4b", 896)}
ENCODED = r"(?:encoded|encoding done) in (\d+(?:\.\d+)?) ms"  # as llama.cpp's versions say it
RUNS = 5  # of an encode, in one process
TIMEOUT_S = 900
LENT = "MTMD_LENT_PATH"  # in the environment: where a peer's Python finds our packages
FILE_TYPES = {
    "BF16": "MOSTLY_BF16",
    "Q8_0": "MOSTLY_Q8_0",
    "Q4_0": "MOSTLY_Q4_0",
    "Q4_K_M": "MOSTLY_Q4_K_M",
}
OPENVINO_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")  # that it reads from GGUF
Rates = dict[str, float]  # per second, by the name of the work; MEMORY and PROCESS in MiB
MEMORY = "memory of an encode"
PROCESS = "peak of the process that encodes"
PEAK = "peak of the process"
SHARE = "share of "  # before the name of a work: of the roofline
Measure = Callable[[str, int], Rates]  # of a type, with so many threads


@dataclass(frozen=True)
class Sizes:
    """What is measured beside the tile."""

    context: tuple[int, ...]
    batch: tuple[int, ...]
    servers: bool = False

    @property
    def prefill(self) -> str:
        return f"prefill of {self.context[0]}"

    @property
    def decode(self) -> str:
        return f"decode after {self.context[0]}"

    @property
    def served(self) -> str:
        return f"{max(self.batch)} answers at once of a server, prompts of {self.context[0]}"

    def works(self) -> dict[tuple[int, int], str]:
        """Names by context and batch."""
        result = {(context, 1): f"decode after {context}" for context in self.context}
        for batch in self.batch:
            if batch > 1:
                result[self.context[0], batch] = (
                    f"decode of {batch} sequences after {self.context[0]}"
                )
        return result


@dataclass(frozen=True)
class Party:
    """Somebody who does the work; `types` are those of `STAGES` that it does. `version` says which
    build it is.
    """

    name: str
    types: tuple[str, ...]
    measure: Measure
    version: Callable[[], str]


def parties(
    folder: Path,
    shape: str,
    sizes: Sizes,
    llama: Path | None,
    more: list[str],
    dtype: str,
    openvino: str | None,
    int8: bool = False,
) -> list[Party]:
    """Ours first, then the peers that are installed."""
    result: list[Party] = []

    def add(name: str, types: Sequence[str], measure: Measure, version: Callable[[], str]) -> None:
        result.append(Party(name, tuple(types), measure, version))

    own = lambda: f"mtmd {installed('mtmd')}, torch {installed('torch')}"  # noqa: E731
    everything = (*TYPES, *ENCODES)
    add("mtmd", everything, lambda t, n: ours(folder, shape, sizes, t, n, dtype), own)
    if int8:
        quantized = [*(kind for kind in TYPES if kind != "BF16"), *ENCODES]
        in_8_bits = ["--activations", "int8"]
        add(
            "mtmd int8",
            quantized,
            lambda t, n: ours(folder, shape, sizes, t, n, dtype, in_8_bits),
            own,
        )
    if bench := program("llama-bench", llama):
        start = [bench, *more]
        add(
            *("llama-bench", TYPES, lambda t, n: llama_bench(start, folder, sizes, t, n)),
            lambda: llama_version(bench),
        )
    if max(sizes.batch) > 1 and (batched := program("llama-batched-bench", llama)):
        add(
            *("llama-batched-bench", TYPES, lambda t, n: llama_batch(batched, folder, sizes, t, n)),
            lambda: llama_version(batched),
        )
    if sizes.servers:
        add("mtmd serve", TYPES, lambda t, n: our_server(folder, sizes, t, n, dtype), own)
        if server := program("llama-server", llama):
            add(
                *("llama-server", TYPES, lambda t, n: llama_server(server, folder, sizes, t, n)),
                lambda: llama_version(server),
            )
    if cli := program("llama-mtmd-cli", llama):
        add(
            *("llama-mtmd-cli", (PROJECTOR,), lambda _, n: llama_encode(cli, folder, n)),
            lambda: llama_version(cli),
        )
    if importlib.util.find_spec("llama_cpp"):
        add(
            *("llama-cpp-python", TYPES, lambda t, n: worker("llama", folder, shape, sizes, t, n)),
            lambda: installed("llama-cpp-python"),
        )
    if importlib.util.find_spec("transformers"):
        both = ("BF16", *ENCODES)
        add(
            *("transformers", both, lambda t, n: worker("torch", folder, shape, sizes, t, n)),
            lambda: f"{installed('transformers')}, torch {installed('torch')}",
        )
    if openvino:
        add(
            "OpenVINO GenAI",
            (*OPENVINO_TYPES, *ENCODES),
            lambda t, n: worker("openvino", folder, shape, sizes, t, n, python=openvino),
            lambda: output(
                [openvino, "-c", "import openvino_genai; print(openvino_genai.__version__)"]
            ).strip(),
        )
    if openvino and int8:
        add(
            "OpenVINO int8",
            ENCODES,
            lambda t, n: worker("openvino", folder, shape, sizes, t, n, python=openvino, int8=True),
            lambda: output(
                [openvino, "-c", "import openvino; print(openvino.__version__)"]
            ).strip(),
        )
    return result


def installed(package: str) -> str:
    """The version of a package, or that there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def llama_version(program: str) -> str:
    """What a program of llama.cpp reports of its build, which not every one of them does."""
    done = subprocess.run(
        [program, "--version"], check=False, capture_output=True, text=True, timeout=60
    )
    lines = [line for line in (done.stdout + done.stderr).splitlines() if "version" in line]
    version = lines[0].removeprefix("version:").strip() if lines else "of unknown version"
    return f"llama.cpp {version}"


def machine() -> str:
    """The processor and its cores."""
    from mtmd.base.cores import usable_cores
    from mtmd.bench.stages import processor

    return f"{processor()}, {usable_cores().usable} cores"


def program(name: str, folder: Path | None) -> str | None:
    return shutil.which(name, path=folder) if folder else shutil.which(name)


def ours(
    folder: Path,
    shape: str,
    sizes: Sizes,
    kind: str,
    threads: int,
    dtype: str,
    options: Sequence[str] = (),
) -> Rates:
    if kind in ENCODES:
        rounds = "int8" in options
        return worker("mtmd", folder, shape, sizes, kind, threads, dtype, int8=rounds)
    command = [sys.executable, "-m", "mtmd.cli", "bench", "--json", "--no-ops", "--rounds", "1"]
    command += ["--threads", str(threads), "--dtype", dtype, *options]
    command += [str(folder / f"{kind}.gguf"), "--images", "0", "--decode", str(DECODE)]
    command += ["--context", ",".join(map(str, sizes.context))]
    command += ["--batch", ",".join(map(str, sizes.batch))]
    text, peak = output_and_peak(command)
    measured = json.loads(text)
    # The process also measures the machine, with arrays of its own.
    rates: Rates = {PEAK: measured["peak_bytes"] / 2**20 if measured["peak_bytes"] else peak}
    for stage in measured["stages"]:
        at = stage["point"]["context"], stage["point"]["batch"]
        name = sizes.works().get(at) if stage["name"] == "decode" else None
        if stage["name"] == "prefill" and at == (sizes.context[0], sizes.batch[0]):
            name = sizes.prefill
        if name:
            rates[name], rates[SHARE + name] = stage["tokens_per_s"], stage["roofline_share"]
    return rates


def llama_bench(start: list[str], folder: Path, sizes: Sizes, kind: str, threads: int) -> Rates:
    command = [*start, "-m", str(folder / f"{kind}.gguf"), "-t", str(threads), "-r", "1"]
    command += ["-o", "json"]
    depths = ",".join(map(str, sizes.context))
    read, read_peak = output_and_peak([*command, "-p", str(sizes.context[0]), "-n", "0"])
    wrote, peak = output_and_peak([*command, "-p", "0", "-n", str(DECODE), "-d", depths])
    works = sizes.works()
    rates = {works[row["n_depth"], 1]: row["avg_ts"] for row in json.loads(wrote)}
    return {sizes.prefill: json.loads(read)[0]["avg_ts"], **rates, PEAK: max(peak, read_peak)}


def llama_batch(program: str, folder: Path, sizes: Sizes, kind: str, threads: int) -> Rates:
    batches, context = [b for b in sizes.batch if b > 1], sizes.context[0]
    command = [program, "-m", str(folder / f"{kind}.gguf"), "-t", str(threads)]
    command += ["-c", str(max(batches) * (context + DECODE)), "-npp", str(context)]
    command += ["-ntg", str(DECODE), "-npl", ",".join(map(str, batches))]
    lines = output([*command, "--output-format", "jsonl"]).splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    works = sizes.works()
    return {works[context, row["pl"]]: row["speed_tg"] for row in rows}


def our_server(folder: Path, sizes: Sizes, kind: str, threads: int, dtype: str) -> Rates:
    slots, length = max(sizes.batch), room(sizes)
    command = [sys.executable, "-m", "mtmd.cli", "serve", "-m", str(folder / f"{kind}.gguf")]
    command += ["--parallel", str(slots), "--context", str(length), "--threads", str(threads)]
    command += ["--dtype", dtype, "--rate-limit", "0", "--no-history"]
    with serving(command) as port:
        return {sizes.served: answers_rate(port, sizes)}


def llama_server(program: str, folder: Path, sizes: Sizes, kind: str, threads: int) -> Rates:
    slots = max(sizes.batch)
    command = [program, "-m", str(folder / f"{kind}.gguf"), "-t", str(threads)]
    command += ["-np", str(slots), "-c", str(slots * room(sizes)), "--jinja"]
    with serving(command) as port:
        return {sizes.served: answers_rate(port, sizes)}


def room(sizes: Sizes) -> int:
    """Tokens of a slot: prompt, template and answer."""
    return sizes.context[0] + DECODE + 128


@contextlib.contextmanager
def serving(command: Sequence[str]) -> Iterator[int]:
    """The port of a server that answers; with the body it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    with tempfile.TemporaryFile() as log:
        whole = [*command, "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(whole, stdout=log, stderr=log)
        try:
            end = time.monotonic() + TIMEOUT_S
            while not healthy(port):
                if server.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    stated = log.read().decode(errors="replace").strip().splitlines()
                    raise RuntimeError(f"the server did not start: {' '.join(stated[-2:])}")
                time.sleep(0.2)
            yield port
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:  # not yet
        return False


def answers_rate(port: int, sizes: Sizes) -> float:
    """Tokens of answers a second, of as many at once as there are slots."""
    draw, count = random.Random(0), max(sizes.batch)
    rate = 0.0
    for _ in range(2):
        # Letters that nobody has asked about, so that no prefix is known; each is a token
        prompts = [
            "".join(draw.choices(string.ascii_lowercase, k=sizes.context[0])) for _ in range(count)
        ]
        with concurrent.futures.ThreadPoolExecutor(count) as clients:
            start = time.perf_counter()
            tokens = sum(clients.map(lambda prompt: answer_tokens(port, prompt), prompts))
            rate = tokens / (time.perf_counter() - start)
    return rate


def answer_tokens(port: int, prompt: str) -> int:
    """How many tokens the answer has."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": DECODE,
        "temperature": 0,
        "logit_bias": {"0": -100},  # its end: answers are of one length
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        result = json.loads(reply.read())
    return int(result["usage"]["completion_tokens"])


def llama_encode(program: str, folder: Path, threads: int) -> Rates:
    """The least time that it reports of its slices of one picture."""
    command = [
        program,
        "-m",
        str(folder / "BF16.gguf"),
        "--mmproj",
        str(folder / f"{PROJECTOR}.gguf"),
    ]
    command += ["--image", str(folder / "tile.png"), "-p", "?", "-n", "1", "-t", str(threads)]
    command.append("--jinja")  # or it knows no templates but its own
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=TIMEOUT_S
    )  # some versions die of an assertion once the picture is encoded and its time told
    text = done.stdout.decode(errors="replace")
    times = [float(ms) for ms in re.findall(ENCODED, text)]
    if not times:
        raise RuntimeError(f"llama-mtmd-cli reported no time of encoding: {text[-200:]!r}")
    return {"encode": 1e3 / min(times)}


def worker(
    which: str,
    folder: Path,
    shape: str,
    sizes: Sizes,
    kind: str,
    threads: int,
    dtype: str = "bf16",
    python: str = sys.executable,
    int8: bool = False,
) -> Rates:
    command = [python, __file__, "--worker", which, "--folder", str(folder)]
    command += ["--int8"] * int8
    command += ["--types", kind, "--threads", str(threads), "--shape", shape, "--dtype", dtype]
    command += ["--context", str(sizes.context[0]), "--batch", ",".join(map(str, sizes.batch))]
    packages = os.pathsep.join(filter(None, sys.path)) if python != sys.executable else None
    text, peak = output_and_peak(command, packages)
    result: Rates = json.loads(text.splitlines()[-1])
    return result if kind in ENCODES else {**result, PEAK: peak}


def output(command: Sequence[str]) -> str:
    return output_and_peak(command)[0]


# getrusage(2) counts to a program what the process held that started it, so a large one does not.
FROM_A_SMALL_PROCESS = """
import os, subprocess, sys, threading
process = subprocess.Popen(sys.argv[2:])
end = threading.Timer(float(sys.argv[1]), process.kill)
end.start()
_, status, used = os.wait4(process.pid, 0)
end.cancel()
print(f"\\n[{os.waitstatus_to_exitcode(status)}, {used.ru_maxrss}]", end="")
"""


def output_and_peak(command: Sequence[str], packages: str | None = None) -> tuple[str, float]:
    """What a command writes, and what it or a process of its own held at most, in MiB. A Python
    imports from `packages` what it does not have itself.
    """
    more = {} if packages is None else {LENT: packages}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", FROM_A_SMALL_PROCESS, str(TIMEOUT_S), *command],
            stdout=out,
            stderr=err,
            env={**os.environ, **more},
        )
        process.wait()
        for file in (out, err):
            file.seek(0)
        text, _, ending = out.read().rpartition("\n")
        code, peak = json.loads(ending)
        if code:
            lines = (err.read() or text).strip().splitlines() or ["it said nothing"]
            how = f"died of signal {-code}" if code < 0 else "failed"
            raise RuntimeError(f"{Path(command[0]).name} {how}: {lines[-1]}")
    return text, peak / 2**10


def timed(work: Callable[[], object]) -> float:
    """Seconds of the second of two runs."""
    work()
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def encode_rates(encode: Callable[[], object]) -> Rates:
    """The best of several encodes after a first one, and what the process held at most meanwhile
    beside what it held before: weights, and whatever made them.
    """
    from mtmd.base.process_memory import resident_bytes, status_bytes
    from mtmd.bench.measure import HostPeak

    encode()
    whole = status_bytes("VmHWM")
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free goes back, so that using it again counts
    peak, before, times = HostPeak(), resident_bytes(), []
    peak.restart()
    for _ in range(RUNS):
        start = time.perf_counter()
        encode()
        times.append(time.perf_counter() - start)
    stored = peak.read()
    memory = {} if stored is None or before is None else {MEMORY: (stored - before) / 2**20}
    if whole is not None:
        memory[PROCESS] = whole / 2**20
    return {"encode": 1 / min(times), **memory}


def our_rates(kind: str, threads: int, dtype: str, int8: bool) -> Rates:
    import numpy as np
    import torch

    from mtmd.bench.shapes import random_checkpoint
    from mtmd.checkpoint.requantize import with_int8_towers
    from mtmd.clip.encoder import Encoder
    from mtmd.kernels.backends import Cpu
    from mtmd.kernels.plan import int8_products

    torch.set_num_threads(threads)
    shape, side = ENCODES[kind]
    checkpoint = random_checkpoint(shape, "BF16")
    compute = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    if int8:
        int8_products.check_device([Cpu()], compute)
        checkpoint = with_int8_towers(checkpoint)
    family, weights = checkpoint.vision, checkpoint.vision_weights
    assert family is not None and weights is not None
    encoder = Encoder(family, weights, [Cpu()], dtype=compute, int8=int8)
    tile = np.random.default_rng(0).standard_normal((3, side, side)).astype(np.float32)
    return encode_rates(lambda: encoder.encode([tile]))


def transformers_tower(kind: str, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.Tensor]:
    """A module from pixels to embeddings, with its attention that is fastest on a CPU, and one
    picture.
    """
    import torch
    import transformers

    from mtmd.bench.shapes import read_shape

    class Tower(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, pixels: torch.Tensor) -> torch.Tensor:
            result = self.model.get_image_features(pixels)
            return result if isinstance(result, torch.Tensor) else result.pooler_output

    shape, side = ENCODES[kind]
    config = read_shape(shape)[1].values
    torch.set_default_dtype(dtype)  # else weights are float32 first, and its peak theirs
    vision = {**config["vision_config"], "attn_implementation": "sdpa"}
    text = {**config["text_config"], "num_hidden_layers": 1}
    if kind == PROJECTOR:
        whole = transformers.SmolVLMConfig(
            text_config=text, vision_config=vision, scale_factor=config["scale_factor"]
        )
        return Tower(transformers.SmolVLMModel(whole).eval()), torch.randn(1, 1, 3, side, side)
    tokens = {k: v for k, v in config.items() if k == "mm_tokens_per_image"}
    gemma = transformers.Gemma3Config(
        text_config={**text, "vocab_size": 512}, vision_config=vision, **tokens
    )
    return Tower(transformers.Gemma3Model(gemma).eval()), torch.randn(1, 3, side, side)


def transformers_rates(shape: str, sizes: Sizes, kind: str, threads: int) -> Rates:
    import torch
    import transformers

    from mtmd.bench.shapes import read_shape

    torch.set_num_threads(threads)
    with torch.inference_mode():
        if kind in ENCODES:
            tower, pixels = transformers_tower(kind, torch.bfloat16)
            return encode_rates(lambda: tower(pixels))
        config = read_shape(shape)[1].values
        values = dict(config.get("text_config", config))
        text = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        model = transformers.AutoModelForCausalLM.from_config(text, attn_implementation="sdpa")
        model = model.to(torch.bfloat16).eval()
        tokens = torch.randint(0, text.vocab_size, (1, sizes.context[0]))

        def read() -> object:
            return model(tokens, use_cache=True, logits_to_keep=1)

        def answer(past: object) -> None:
            token = tokens[:, :1]
            for _ in range(DECODE):
                token = model(token, past_key_values=past, use_cache=True).logits.argmax(-1)

        prefill = sizes.context[0] / timed(read)
        past = read().past_key_values  # type: ignore[attr-defined]
        return {sizes.prefill: prefill, sizes.decode: DECODE / timed(lambda: answer(past))}


def llama_cpp_rates(folder: Path, sizes: Sizes, kind: str, threads: int) -> Rates:
    from llama_cpp import Llama

    model = Llama(
        str(folder / f"{kind}.gguf"),
        n_ctx=sizes.context[0] + 4 * DECODE,
        n_threads=threads,
        n_threads_batch=threads,
        n_batch=512,
        verbose=False,
    )
    tokens = [i * 7919 % 40_000 for i in range(sizes.context[0])]

    def read() -> None:
        model.reset()
        model.eval(tokens)

    def answer() -> None:
        for _ in range(DECODE):
            model.eval([model.sample(temp=0.0)])

    prefill = sizes.context[0] / timed(read)
    return {sizes.prefill: prefill, sizes.decode: DECODE / timed(answer)}


def openvino_rates(folder: Path, sizes: Sizes, kind: str, threads: int) -> Rates:
    """The best of a few answers as it times them itself, each to a prompt of its own, since it
    reads none twice.
    """
    import numpy as np
    import openvino
    import openvino_genai

    model = openvino_genai.LLMPipeline(
        str(folder / f"{kind}.gguf"), "CPU", INFERENCE_NUM_THREADS=threads
    )
    config = openvino_genai.GenerationConfig(
        max_new_tokens=DECODE, min_new_tokens=DECODE, ignore_eos=True, do_sample=False
    )
    rates: Rates = {sizes.prefill: 0.0, sizes.decode: 0.0}
    for number in range(3):
        tokens = (np.arange(sizes.context[0]) * 7919 + number * 101) % 40_000
        prompt = openvino.Tensor(tokens[None].astype(np.int64))
        took = model.generate(prompt, config).perf_metrics
        for work, rate in (
            (sizes.prefill, sizes.context[0] * 1e3 / took.get_ttft().mean),
            (sizes.decode, 1e3 / took.get_tpot().mean),
        ):
            rates[work] = max(rates[work], rate)
    del model
    for batch in sizes.batch:
        if batch > 1:
            work = sizes.works()[sizes.context[0], batch]
            rates[work] = openvino_batch(folder / f"{kind}.gguf", sizes.context[0], batch, threads)
    return rates


def openvino_batch(path: Path, context: int, batch: int, threads: int) -> float:
    """Tokens a second of sequences that decode together: the time by which the better of two rounds
    of answers exceeds that of answers of one token. All prompts may be read in one step.
    """
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = batch, batch * context
    scheduler.enable_prefix_caching = False
    model = openvino_genai.ContinuousBatchingPipeline(
        str(path), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
    )
    rows = np.arange(batch)[:, None] * 101 + np.arange(context)[None] * 7919
    prompts = [openvino.Tensor((row % 40_000)[None].astype(np.int64)) for row in rows]

    def seconds(tokens: int) -> float:
        config = openvino_genai.GenerationConfig(
            max_new_tokens=tokens, min_new_tokens=tokens, ignore_eos=True, do_sample=False
        )
        start = time.perf_counter()
        model.generate(prompts, [config] * batch)
        return time.perf_counter() - start

    seconds(2)
    whole, read = (min(seconds(tokens) for _ in range(2)) for tokens in (DECODE, 1))
    return batch * (DECODE - 1) / (whole - read)


def openvino_encodes(kind: str, threads: int, int8: bool) -> Rates:
    """Encodes a second of transformers' module, converted by OpenVINO, in bfloat16, or `int8` with
    quantized products. torch and transformers are those of the Python that has started this one.
    """
    import openvino
    import torch

    with torch.inference_mode():
        module, pixels = transformers_tower(kind, torch.float32)
        whole = openvino.convert_model(module, example_input=pixels)
    if int8:
        quantize_products(whole, pixels.numpy())
    model = openvino.compile_model(
        whole, "CPU", {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"}
    )
    request = model.create_infer_request()
    values = pixels.numpy()
    # Its memory includes that of the conversion, so it is left out.
    return {"encode": encode_rates(lambda: request.infer([values]))["encode"]}


def quantize_products(model: Any, pixels: Any) -> None:
    """Quantize what products with weights read to 8 bits, as NNCF's post-training quantization
    does: a range for each row of a weight, and one for each x, of the values that these pixels
    give.
    """
    import openvino
    from openvino import opset13

    products = [
        node
        for node in model.get_ops()
        if node.get_type_name() == "MatMul"
        and node.input_value(1).get_node().get_type_name() == "Constant"
    ]
    read = openvino.Model([node.input_value(0) for node in products], model.get_parameters())
    request = openvino.compile_model(read, "CPU").create_infer_request()
    values = request.infer([pixels])
    for index, node in enumerate(products):
        low, high = values[index].min(), values[index].max()
        rounded = opset13.fake_quantize(node.input_value(0), low, high, low, high, 256)
        largest = abs(node.input_value(1).get_node().data).max(axis=1, keepdims=True)
        weight = opset13.fake_quantize(
            node.input_value(1), -largest, largest, -largest, largest, 255
        )
        node.input(0).replace_source_output(rounded.output(0))
        node.input(1).replace_source_output(weight.output(0))


def write_models(folder: Path, shape: str, kinds: Sequence[str]) -> None:
    """GGUF files that are not there yet, and a picture."""
    from mtmd.bench.shapes import random_checkpoint

    folder.mkdir(parents=True, exist_ok=True)
    for kind in kinds:
        if kind != TOWER and not (path := folder / f"{kind}.gguf").exists():
            weights = "BF16" if kind == PROJECTOR else kind
            own = SHAPE if kind == PROJECTOR else shape
            checkpoint = random_checkpoint(own, weights)
            whole = checkpoint.vision_weights if kind == PROJECTOR else checkpoint.text_weights
            assert whole is not None
            write_gguf(path.with_suffix(".part"), own, whole.file, kind == PROJECTOR)
            path.with_suffix(".part").rename(path)
    (folder / "tile.png").write_bytes(png(TILE))


def write_gguf(path: Path, shape: str, file, projector: bool) -> None:  # type: ignore[no-untyped-def]
    import gguf
    import torch

    from mtmd.bench.shapes import read_shape

    _, config, image = read_shape(shape)
    text = config.values.get("text_config", config.values)
    writer = gguf.GGUFWriter(path, "clip" if projector else text["model_type"])
    if projector:
        add_vision_keys(writer, config.values, image.values)
    else:
        add_text_keys(writer, text)
        writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[path.stem]])  # OpenVINO asks for it
    for name in file.names():
        kind = gguf.GGMLQuantizationType[file.kind(name)]
        values = file.read(name)
        if projector and (values.ndim == 1 or name.startswith(("v.patch_embd", "v.position"))):
            kind, values = gguf.GGMLQuantizationType.F32, values.float()  # as its converter has it
        if values.dtype == torch.bfloat16:
            values = values.view(torch.uint8)
        writer.add_tensor(name, values.numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_text_keys(writer, c: dict) -> None:  # type: ignore[no-untyped-def,type-arg]
    from mtmd.bench.shapes import TEMPLATE

    heads = c["num_attention_heads"]
    size = c.get("head_dim") or c["hidden_size"] // heads
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_rope_dimension_count(size)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_vocab_size(c["vocab_size"])
    # Bytes as GPT-2 spells them, control tokens, then words that nobody writes.
    saved = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in saved]
    spelled = [chr(b) if b in saved else chr(256 + others.index(b)) for b in range(256)]
    control = ["<|end|>", "<image>", "<fake_token_around_image>", "<global-img>"]
    tokens = [*control, *spelled, "ab"]
    tokens += [f"unused{i}" for i in range(c["vocab_size"] - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(control) + [1] * (len(tokens) - len(control)))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE.replace("{{ image_marker }}", "<image>"))


def add_vision_keys(writer, config: dict, image: dict) -> None:  # type: ignore[no-untyped-def,type-arg]
    c = config["vision_config"]
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "idefics3")
    writer.add_bool("clip.use_gelu", True)
    for key, value in {
        "image_size": c["image_size"],
        "patch_size": c["patch_size"],
        "embedding_length": c["hidden_size"],
        "feed_forward_length": c["intermediate_size"],
        "block_count": c["num_hidden_layers"],
        "attention.head_count": c["num_attention_heads"],
        "projection_dim": config["text_config"]["hidden_size"],
        "projector.scale_factor": config["scale_factor"],
        "preproc_image_size": c["image_size"],  # one tile, not a picture cut into many
    }.items():
        writer.add_uint32(f"clip.vision.{key}", value)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-6)
    writer.add_array("clip.vision.image_mean", image["image_mean"])
    writer.add_array("clip.vision.image_std", image["image_std"])


def png(side: int) -> bytes:
    """A grey square, written by hand: one filter byte before each row."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = zlib.crc32(name + data)
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)

    rows = (b"\0" + b"\x80" * 3 * side) * side
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(name, data) for name, data in parts)


Key = tuple[str, str, int, str]  # type, work, busy processes, party


def compare(args: argparse.Namespace, folder: Path) -> dict[Key, list[float]]:
    """Rates by type, work, load and party, of every round; who fails is told of and left out."""
    from mtmd.bench.measure import busy

    more = args.llama_bench_args.split()
    everybody = parties(
        *(folder, args.shape, args.sizes, args.llama_dir, more, args.dtype, args.openvino),
        int8=args.int8,
    )
    if args.parties:
        everybody = [party for party in everybody if party.name in args.parties.split(",")]
    print(machine(), file=sys.stderr)
    for party in everybody:
        print(f"{party.name}: {party.version()}", file=sys.stderr)
    failed = set()
    result: dict[Key, list[float]] = {}
    for number in range(args.rounds):
        for load in args.load:
            for kind in args.types:
                for party in everybody:
                    if kind not in party.types or (party.name, kind) in failed:
                        continue
                    print(f"round {number + 1}: {party.name} {kind}, load {load}", file=sys.stderr)
                    try:
                        with busy(load):
                            rates = party.measure(kind, args.threads)
                    except (
                        RuntimeError,
                        ValueError,
                        KeyError,
                        OSError,
                        subprocess.TimeoutExpired,
                    ) as error:
                        failed.add((party.name, kind))
                        print(f"{party.name} {kind} failed: {error}", file=sys.stderr)
                        continue
                    for work, rate in rates.items():
                        if not work.startswith(SHARE):
                            print(f"    {work}: {rate:.2f}", file=sys.stderr)
                        result.setdefault((kind, work, load, party.name), []).append(rate)
    return result


def show(result: dict[Key, list[float]]) -> None:
    for kind, work, load in dict.fromkeys(key[:3] for key in result):
        at = {
            name: result[key] for key in result if key[:3] == (kind, work, load) for name in key[3:]
        }
        if work.startswith(SHARE):
            continue
        unit = {"encode": "tiles/s", MEMORY: "MiB", PROCESS: "MiB", PEAK: "MiB"}.get(work, "tok/s")
        minimum = unit == "MiB"  # the better one
        alongside = f", {load} busy processes beside it" if load else ""
        print(f"\n{work}, {kind}{alongside}")
        mine = at.get("mtmd", at.get("mtmd serve"))
        shares = result.get((kind, SHARE + work, load, "mtmd"))
        for name, rates in at.items():
            median = statistics.median(rates)
            maximum = min if minimum else max
            line = f"  {name:<19} best {maximum(rates):9.2f}  median {median:9.2f} {unit}"
            if name == "mtmd" and shares:
                line += f"   share of the roofline: best {max(shares):.0%}, "
                line += f"median {statistics.median(shares):.0%}"
                if max(shares) > 1:
                    line += " (above 100 %: read from the processor's caches, not from memory)"
            if mine and not name.startswith("mtmd"):
                best, middle = maximum(mine) / maximum(rates), statistics.median(mine) / median
                line += f"   mtmd / it: best {best:.2f}, median {middle:.2f}"
            print(line)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = tuple(kind for kinds in STAGES.values() for kind in kinds)
    parser.add_argument("--stage", choices=tuple(STAGES), help="pictures or text alone")
    parser.add_argument("--types", help=f"some of {','.join(known)} (default: all of the stage)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--shape", default=SHAPE, help="of text (default: %(default)s)")
    parser.add_argument("--context", default="256", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument("--batch", default="1", metavar="LIST", help="(default: %(default)s)")
    parser.add_argument(
        "--servers", action="store_true", help="also the largest batch as requests to servers"
    )
    parser.add_argument("--load", default="0", help="busy processes, like 0,1 (default: 0)")
    parser.add_argument("--dtype", default="bf16", help="of this project (default: %(default)s)")
    parser.add_argument(
        "--int8",
        action="store_true",
        help="also this project with --activations int8, and OpenVINO's encode in int8",
    )
    parser.add_argument("--parties", metavar="LIST", help="some of them (default: all there are)")
    parser.add_argument("--llama-dir", type=Path, help="where llama.cpp's programs are")
    parser.add_argument(
        "--openvino", metavar="PYTHON", help="the Python that has openvino-genai (default: none)"
    )
    parser.add_argument(
        "--llama-bench-args",
        default="",
        metavar="ARGS",
        help="further arguments for it, such as '--repack 0' where its AMX code crashes",
    )
    parser.add_argument("--folder", type=Path, help="keeps the models (default: a temporary one)")
    parser.add_argument("--json", action="store_true", help="print all rates as JSON")
    parser.add_argument(
        "--worker", choices=("torch", "llama", "mtmd", "openvino"), help=argparse.SUPPRESS
    )
    args = parser.parse_args()
    sys.path += filter(None, os.environ.get(LENT, "").split(os.pathsep))
    chosen = STAGES[args.stage] if args.stage else known
    args.types = args.types.split(",") if args.types else list(chosen)
    args.load = [int(n) for n in args.load.split(",")]
    context, batch = (tuple(map(int, a.split(","))) for a in (args.context, args.batch))
    args.sizes = Sizes(context, batch, args.servers)
    if wrong := [t for t in args.types if t not in known]:
        parser.error(f"type {wrong[0]!r}: expected some of {','.join(known)}")
    if args.worker:
        kind, threads = args.types[0], args.threads
        rates = {
            "mtmd": lambda: our_rates(kind, threads, args.dtype, args.int8),
            "torch": lambda: transformers_rates(args.shape, args.sizes, kind, threads),
            "llama": lambda: llama_cpp_rates(args.folder, args.sizes, kind, threads),
            "openvino": lambda: (
                openvino_encodes(kind, threads, args.int8)
                if kind in ENCODES
                else openvino_rates(args.folder, args.sizes, kind, threads)
            ),
        }[args.worker]()
        print(json.dumps(rates))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        extra = ["BF16"] if PROJECTOR in args.types else []  # llama-mtmd-cli wants a decoder
        write_models(folder, args.shape, dict.fromkeys([*args.types, *extra]))
        result = compare(args, folder)
    if args.json:
        rows = [
            dict(zip(("type", "work", "load", "party"), k, strict=True), rates=r)
            for k, r in result.items()
        ]
        print(json.dumps(rows))
    else:
        show(result)


if __name__ == "__main__":
    main()
