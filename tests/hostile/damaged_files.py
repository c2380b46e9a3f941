"""Damaged files of weights, one after another: quantized checkpoints in every format, importance
matrices, sources of a conversion. Each is read or refused in one line, and nothing large is
allocated; ends with exit code 1 where one is not.

    .venv/bin/python tests/hostile/damaged_files.py --files 2000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import torch
from mutations import EXTREME, mutate_bytes, mutate_json, mutate_safetensors
from mutations_gguf import mutate_gguf
from quantized_files import FORMATS
from safetensors.torch import load_file, save_file

from mtmd.base.errors import MtmdError
from mtmd.convert.convert import convert
from mtmd.convert.imatrix import read_imatrix
from mtmd.kernels.checkpoint.gguf_writer import write_gguf
from mtmd.kernels.checkpoint.open_weights import open_weights
from mtmd.kernels.checkpoint.tensor_writer import Planned
from mtmd.loading import DEMO_MODEL

PEAK_BYTES = 64 << 20  # above what the process has already; the largest sound file takes a quarter
LINE_MAX = 600
ROWS, COLUMNS = 32, 256
DEMO_FORMATS = ("fp8", "awq", "gptq", "int4", "nvfp4", "nf4")
Use = Callable[[], None]


@dataclass
class Account:
    """What became of the files: how many were read and refused, the different refusals, the most
    that one took, and what should not have been, a line each.
    """

    read: int = 0
    refused: int = 0
    messages: Counter[str] = field(default_factory=Counter)
    peak_bytes: int = 0
    cpu_s: float = 0.0
    problems: list[str] = field(default_factory=list)


def quantized(rng: random.Random, folder: Path) -> tuple[str, Use]:
    """A checkpoint of one weight: its settings, its header or its numbers are damaged, or it says
    that it is in another format.
    """
    name = rng.choice(list(FORMATS))
    config, weights = sound(name)
    kind = rng.choices(("settings", "weights", "both", "other", "numbers"), (6, 6, 1, 2, 2))[0]
    what = [name]
    if kind == "other":
        other = rng.choice(list(FORMATS))
        config = sound(other)[0]
        what.append(f"as {other}")
    if kind == "numbers":
        config = _renumbered(config, rng)
        what.append("a number of the settings")
    if kind in ("settings", "both"):
        config, done = mutate_json(config, rng)
        what.append(done)
    if kind in ("weights", "both"):
        weights, done = mutate_safetensors(weights, rng)
        what.append(done)
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(weights)

    def use() -> None:
        file = open_weights(folder)
        for each in file.names():
            shape, dtype = file.meta(each)
            tensor = file.read(each)
            assert tensor.dtype == dtype, (tensor.dtype, dtype)
            assert tensor.shape[:-1] == shape[:-1], (tensor.shape, shape)

    return "; ".join(what), use


def matrix(rng: random.Random, folder: Path) -> tuple[str, Use]:
    """An importance matrix in one of its two forms."""
    form = rng.choice(("gguf", "dat"))
    path = folder / f"matrix.{form}"
    data, what = (mutate_gguf if form == "gguf" else mutate_bytes)(sound_matrix(form), rng)
    path.write_bytes(data)

    def use() -> None:
        for values in read_imatrix(path).values():
            assert bool(values.isfinite().all())

    return f"matrix.{form}: {what}", use


def source(rng: random.Random, folder: Path) -> tuple[str, Use]:
    """A whole model as a GGUF, or as a folder of quantized weights, that is converted."""
    out = folder / "out.gguf"
    if rng.random() < 0.5:
        path = folder / "source.gguf"
        data, what = mutate_gguf(sound_gguf(), rng)
        path.write_bytes(data)
    else:
        name = rng.choice(DEMO_FORMATS)
        config, weights = sound_model(name)
        if rng.random() < 0.5:
            config, what = mutate_json(config, rng)
        else:
            weights, what = mutate_safetensors(weights, rng)
        path = folder / "source"
        shutil.copytree(DEMO_MODEL, path, ignore=shutil.ignore_patterns("model*", "__*", "config*"))
        (path / "config.json").write_bytes(config)
        (path / "model.safetensors").write_bytes(weights)
        what = f"{name}: {what}"

    def use() -> None:
        try:
            convert(path, out, to="Q4_0", text_only=True)
        except MtmdError:
            assert not out.exists(), "a file under the name that was asked for"
            raise
        assert out.stat().st_size > 0

    return f"{path.name}: {what}", use


Kind = Callable[[random.Random, Path], tuple[str, Use]]
KINDS: dict[Kind, int] = {quantized: 15, matrix: 4, source: 1}
"""Shares of the files."""


@lru_cache(maxsize=len(FORMATS))
def sound(name: str) -> tuple[bytes, bytes]:
    """config.json and model.safetensors of a checkpoint in a format."""
    form = FORMATS[name]
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
    parts = {f"x.{part}": t.contiguous() for part, t in form.quantize(weight)[0].items()}
    return _settings({}, name), _safetensors(parts | {"norm.weight": torch.ones(4)})


@lru_cache(maxsize=2)
def sound_matrix(form: str) -> bytes:
    """A matrix of two tensors, one of experts."""
    sums = {"blk.0.ffn_up.weight": torch.rand(1, 48), "blk.0.ffn_up_exps.weight": torch.rand(3, 40)}
    if form == "gguf":
        parts = []
        for name, values in sums.items():
            counts = torch.full((len(values), 1), 4.0)
            for end, tensor in ((".in_sum2", values), (".counts", counts)):
                parts.append(Planned(name + end, tuple(tensor.shape), "F32", lambda t=tensor: t))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "matrix.gguf"
            write_gguf(path, {"general.type": "imatrix", "imatrix.chunk_count": 4}, parts)
            return path.read_bytes()
    entries = [struct.pack("<i", len(sums))]
    for name, values in sums.items():
        head = struct.pack("<i", len(name)) + name.encode()
        entries.append(head + struct.pack("<ii", 4, values.numel()) + values.numpy().tobytes())
    return b"".join(entries)


@lru_cache(maxsize=1)
def sound_gguf() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        (made,) = convert(DEMO_MODEL, Path(folder) / "sound.gguf", to="Q8_0", text_only=True)
        return made.path.read_bytes()


@lru_cache(maxsize=len(DEMO_FORMATS))
def sound_model(name: str) -> tuple[bytes, bytes]:
    """config.json and model.safetensors of the demo model, its decoder in a format."""
    stored: dict[str, torch.Tensor] = {}
    for key, weight in load_file(DEMO_MODEL / "model.safetensors").items():
        if key.endswith("_proj.weight") and "vis" not in key and weight.shape[1] % 128 == 0:
            held, _ = FORMATS[name].quantize(weight.float())
            base = key.removesuffix("weight")
            stored |= {f"{base}{part}": tensor.contiguous() for part, tensor in held.items()}
        else:
            stored[key] = weight
    return _settings(json.loads((DEMO_MODEL / "config.json").read_text()), name), _safetensors(
        stored
    )


def _settings(config: dict[str, object], name: str) -> bytes:
    return json.dumps(config | {"quantization_config": FORMATS[name].settings}).encode()


def _safetensors(tensors: dict[str, torch.Tensor]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        save_file(tensors, path)
        return path.read_bytes()


def _renumbered(config: bytes, rng: random.Random) -> bytes:
    """One number of the settings, wherever it is, is another."""
    settings = json.loads(config)
    places: list[tuple[dict[str, object] | list[object], str | int]] = []
    waiting: list[object] = [settings]
    while waiting:
        holder = waiting.pop()
        if isinstance(holder, (dict, list)):
            for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
                waiting.append(value)
                if type(value) is int:
                    places.append((holder, key))  # type: ignore[arg-type]
    if places:
        at, key = rng.choice(places)
        at[key] = rng.choice((*EXTREME[:-1], -1, -128, 2, 16, 32, 48, 256))  # type: ignore[index]
    return json.dumps(settings).encode()


def attack(kind: Kind, count: int, seed: int, scratch: Path) -> Account:
    """So many files of a kind, one after another."""
    account = Account()
    kind(random.Random("warm"), _fresh(scratch))  # sound files are made, and what they need
    for number in range(count):
        rng = random.Random(f"{kind.__name__} {seed} {number}")
        what, use = kind(rng, _fresh(scratch))
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        before, begin = _status("VmRSS"), time.process_time()
        outcome = _outcome(use, account)
        account.cpu_s = max(account.cpu_s, time.process_time() - begin)
        taken = _status("VmHWM") - before
        account.peak_bytes = max(account.peak_bytes, taken)
        if outcome is None and taken > PEAK_BYTES:
            outcome = f"{taken >> 20} MiB were allocated"
        if outcome is not None:
            account.problems.append(f"{kind.__name__} {number} ({what:.200}): {outcome}")
    return account


def _outcome(use: Use, account: Account) -> str | None:
    """None for a file that was read, or refused in one short line; else what was wrong."""
    try:
        use()
        account.read += 1
    except MtmdError as error:
        text = str(error)
        account.refused += 1
        account.messages[text.rpartition(": ")[0][-20:] + text.rpartition(": ")[2][:30]] += 1
        if not text.isprintable() or not 0 < len(text) < LINE_MAX:
            return f"not one short line: {text!r:.800}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-3:])
        return f"{type(error).__name__}: {error!s:.300} {''.join(frames)}"
    return None


def _fresh(scratch: Path) -> Path:
    folder = scratch / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _status(field_: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{field_}:")[2].split()[0]) << 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # of overflows: no more than a line on stderr
    torch.set_num_threads(1)
    limit = _status("VmSize") + (8 << 30)  # so that a mistake does not take the machine's memory
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        for kind, share in KINDS.items():
            count = args.files * share // sum(KINDS.values())
            result = attack(kind, count, args.seed, Path(scratch))
            print(
                f"{kind.__name__}: {count} files, {result.read} read, {result.refused} refused in "
                f"{len(result.messages)} ways; at most {result.peak_bytes >> 10} KiB and "
                f"{1000 * result.cpu_s:.0f} ms of CPU for one",
                *result.problems,
                sep="\n  ",
                flush=True,
            )
            wrong += len(result.problems)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
