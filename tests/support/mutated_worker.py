"""Opens mutated checkpoints and asks them something, one after another, and writes a line of JSON
for each: run by `Worker` of mutated_files.py.

    python tests/support/mutated_worker.py SEEDS SCRATCH [KIND FIRST LAST]

SEEDS has a folder for each sound checkpoint; SCRATCH is an empty folder. Without a kind, lines of
the standard input name one each ("KIND FIRST LAST"): importing and compiling what a first answer
needs takes longer than a hundred cases. A case that takes more than `CPU_SECONDS` of the processor
ends this process with a traceback, as one that crashes does; whoever reads the lines sees where it
happened.
"""

from __future__ import annotations

import faulthandler
import json
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutations import (
    EXTREME,
    Made,
    mutate_bytes,
    mutate_json,
    mutate_safetensors,
    mutate_template,
    replacement,
)
from mutations_gguf import mutate_gguf

CPU_SECONDS = 5.0
WAIT_SECONDS = 60  # for one that does nothing at all: long, since a busy machine makes nobody fail
SPACE = (
    6 << 30
)  # of addresses, beyond those in use: so that a mistake does not take the machine's memory
INDEX, SHARD = "model.safetensors.index.json", "model-00001-of-00001.safetensors"
CONFIG, PROCESSOR = (
    ("config.json", "config.json", "generation_config.json"),
    ("preprocessor_config.json", "processor_config.json"),
)
NEEDED = {
    "config": CONFIG,
    "processor": PROCESSOR,
    "tokenizer": CONFIG,
    "bombs": ("tokenizer.json",),
    "template": CONFIG,
    "safetensors": CONFIG,
    "gguf": ("*.gguf",),
}
Mutation = Callable[[Path, random.Random], str]


def main(seeds: str, scratch: str, *cases: str) -> None:
    from mtmd.model import Model  # everything imported before the first case is timed

    faulthandler.register(signal.SIGPROF, chain=True)
    faulthandler.register(signal.SIGALRM, chain=True)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPACE, used + SPACE))
    warnings.simplefilter("ignore")  # of overflows, say: no more than a line on stderr
    for sound in fitting(cases[0] if cases else "none", Path(seeds)):
        attempt(sound, Model)  # kernels are compiled at first use: no file's doing
    for kind, first, last in [cases] if cases else map(str.split, sys.stdin):
        run(kind, range(int(first), int(last)), Path(seeds), Path(scratch), Model)


def run(kind: str, numbers: range, seeds: Path, scratch: Path, model_of: Any) -> None:
    """One case for each number."""
    for seed in numbers:
        folder = scratch / "model"
        what = make(kind, seed, seeds, folder)
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        signal.alarm(WAIT_SECONDS)
        outcome, message = attempt(folder, model_of)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.alarm(0)
        line = {
            "seed": seed,
            "what": what,
            "outcome": outcome,
            "message": message,
            "cpu": time.process_time() - begin,
            "peak": peak(),
        }
        print(json.dumps(line), flush=True)
        shutil.rmtree(folder)


def make(kind: str, seed: int, seeds: Path, folder: Path) -> str:
    """A copy of one of the checkpoints that has files of this kind, one of them mutated. Returns
    what was done.
    """
    rng = random.Random(f"{kind} {seed}")
    choices = fitting(kind, seeds)
    source = choices[seed % len(choices)] if kind == "none" else rng.choice(choices)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    return f"{source.name}: {MUTATIONS[kind](folder, rng)}"


def fitting(kind: str, seeds: Path) -> list[Path]:
    """The sound checkpoints that have files of this kind."""
    return sorted(
        p for p in seeds.iterdir() if any(any(p.glob(name)) for name in NEEDED.get(kind, ("*",)))
    )


def attempt(folder: Path, model_of: Any) -> tuple[str, str]:
    """ "loaded", the name of an MtmdError, or how it went wrong, in words; and the error's text."""
    from mtmd.base.errors import DeviceMemoryError, MtmdError
    from mtmd.checkpoint.open import open_checkpoint
    from mtmd.options.load import LoadOptions

    try:
        checkpoint = open_checkpoint(folder)
        model = model_of(checkpoint, LoadOptions(device="cpu", dtype="fp32", context=128))
        parts = [{"type": "text", "text": "What?"}]
        if checkpoint.vision:
            parts.insert(0, {"type": "image", "image": picture()})
        try:
            for _ in model.stream(
                [{"role": "user", "content": parts}], max_tokens=2, ignore_eos=True
            ):
                pass
        finally:
            model.close()
    except DeviceMemoryError as error:  # of models that have some MB
        return "more memory than there is", str(error)
    except MtmdError as error:
        text = str(error)
        if text.startswith(
            "internal error"
        ):  # how the device thread passes on what it did not expect
            return "a defect", text + traced(error.__cause__)
        one_line = text.isprintable() and 0 < len(text) < 1000
        return type(error).__name__ if one_line else "an error that is not one short line", text
    except BaseException as error:
        return f"{type(error).__name__}, which is no MtmdError", traced(error)
    return "loaded", ""


def traced(error: BaseException | None) -> str:
    """An error with the last places it went through."""
    frames = traceback.format_list(traceback.extract_tb(error.__traceback__)[-4:]) if error else []
    return f"{error!s:.500} {''.join(frames)}"


def picture() -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)


def peak() -> int:
    """Bytes of memory at most since the last case began."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


def change(path: Path, mutation: Callable[[bytes, random.Random], Made], rng: random.Random) -> str:
    content, what = mutation(path.read_bytes(), rng)
    path.unlink()
    path.write_bytes(content)
    return f"{path.name}: {what}"


def one_of(folder: Path, names: tuple[str, ...], rng: random.Random) -> Path:
    return rng.choice([folder / name for name in names if (folder / name).exists()])


def mutate_config(folder: Path, rng: random.Random) -> str:
    """One file's values; or a number wherever it stands, so that the files still agree."""
    if rng.random() < 0.15:
        return _change_everywhere(folder, rng)
    return change(one_of(folder, CONFIG, rng), mutate_json, rng)


def _change_everywhere(folder: Path, rng: random.Random) -> str:
    old = rng.choice(sorted(set(re.findall(r"\b\d+\b", (folder / "config.json").read_text()))))
    new = str(replacement(int(old), rng) if rng.random() < 0.3 else rng.choice(EXTREME[:-2]))
    for name in (*CONFIG[1:], *PROCESSOR):
        if (path := folder / name).exists():
            text = re.sub(rf"(?<![\w.]){old}(?![\w.])", lambda _: new, path.read_text())
            path.unlink()
            path.write_bytes(text.encode("utf-8", "replace"))
    return f"{old} = {new[:60]} everywhere"


def mutate_processor(folder: Path, rng: random.Random) -> str:
    return change(one_of(folder, PROCESSOR, rng), mutate_json, rng)


def mutate_tokenizer(folder: Path, rng: random.Random) -> str:
    special = folder / "special_tokens_map.json"
    if rng.random() < 0.1 and not special.exists():
        names = json.loads((folder / "tokenizer_config.json").read_text())
        special.write_text(
            json.dumps({key: value for key, value in names.items() if key.endswith("_token")})
        )
        return change(special, mutate_json, rng)
    return change(
        one_of(folder, ("tokenizer.json", "tokenizer.json", "tokenizer_config.json"), rng),
        mutate_json,
        rng,
    )


def mutate_chat(folder: Path, rng: random.Random) -> str:
    """The template in a file of its own, or in one of the JSON files that may hold it."""
    path = folder / "chat_template.jinja"
    if rng.random() < 0.7:
        return change(path, mutate_template, rng)
    template, what = mutate_template(path.read_bytes(), rng)
    path.unlink()
    name = rng.choice(("chat_template.json", "tokenizer_config.json"))
    stored = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    text: Any = template.decode("utf-8", "replace")
    stored["chat_template"] = rng.choice(
        (
            text,
            text,
            [{"name": "default", "template": text}],
            [{"name": text}],
            [text],
            {"default": text},
        )
    )
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_text(json.dumps(stored))
    return f"{name}: {what} as {type(stored['chat_template']).__name__}"


def mutate_weights(folder: Path, rng: random.Random) -> str:
    """The one file, or the index of one with a shard."""
    path = folder / "model.safetensors"
    if rng.random() > 0.15:
        return change(path, mutate_safetensors, rng)
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    path.rename(folder / SHARD)
    (folder / INDEX).write_text(
        json.dumps(
            {
                "metadata": {},
                "weight_map": {name: SHARD for name in header if name != "__metadata__"},
            }
        )
    )
    return change(folder / INDEX, mutate_json, rng)


def mutate_into_bomb(folder: Path, rng: random.Random) -> str:
    """A tokenizer that makes much of little, in its steps, its tokens, or its form."""
    path = folder / "tokenizer.json"
    values: dict[str, Any] = json.loads(path.read_text())
    many = rng.choice((1, 3, 7, 60))
    longer = {
        "type": "Replace",
        "pattern": {"String": "a"},
        "content": "a" * rng.choice((1, 16, 999)),
    }
    kind = rng.choice(
        ("normalizer", "decoder", "pre_tokenizer", "tokens", "length", "depth", "merges")
    )
    if kind in ("normalizer", "decoder"):
        values[kind] = {"type": "Sequence", f"{kind}s": [longer] * many}
    elif kind == "pre_tokenizer":
        pattern = rng.choice(
            ("(a|b)*a(a|b){15}", "(a+)+$", "(?=.*x)", "", ".", "(", "\\p{L}{1000}")
        )
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }
        values[kind] = {"type": "Sequence", "pretokenizers": [split] * many}
    elif kind in ("tokens", "length"):
        count, length = (many * 200, 20) if kind == "tokens" else (many, rng.choice((2000, 60_000)))
        begin = max((t["id"] for t in values["added_tokens"]), default=0) + 1
        form = {
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": rng.random() < 0.5,
        }
        values["added_tokens"] += [
            form | {"id": begin + i, "content": f"<{i}" + "x" * length, "special": True}
            for i in range(count)
        ]
    elif kind == "depth":
        step: Any = {"type": "Strip", "strip_left": True, "strip_right": True}
        for _ in range(many * 5):  # of 60: deeper than any limit, and what json writes
            step = {"type": "Sequence", "normalizers": [step]}
        values["normalizer"] = step
    else:
        model = values["model"]
        words = sorted(model.get("vocab", {}), key=len)[-50:]
        model["merges"] = [
            *model.get("merges", []),
            *([[a, b] for a in words for b in words] * many),
        ]
    path.unlink()
    path.write_text(json.dumps(values))
    return f"tokenizer.json: {kind}, {many}"


def mutate_gguf_file(folder: Path, rng: random.Random) -> str:
    return change(rng.choice(sorted(folder.glob("*.gguf"))), mutate_gguf, rng)


def mutate_nothing(folder: Path, rng: random.Random) -> str:  # noqa: ARG001
    return "as it is"


def mutate_any(folder: Path, rng: random.Random) -> str:
    """The bytes of any file, an empty file, or one in another's place."""
    path, kind = (
        rng.choice(sorted(folder.iterdir())),
        rng.choice(("bytes", "bytes", "empty", "other", "gone", "folder")),
    )
    other = rng.choice(sorted(folder.iterdir())).read_bytes()
    if kind == "bytes" and path.stat().st_size:
        return change(path, mutate_bytes, rng)
    path.unlink()
    if kind in ("empty", "other"):
        path.write_bytes(other if kind == "other" else b"")
    elif kind == "folder":
        path.mkdir()
    return f"{path.name} {kind}"


MUTATIONS: dict[str, Mutation] = {
    "config": mutate_config,
    "processor": mutate_processor,
    "tokenizer": mutate_tokenizer,
    "template": mutate_chat,
    "safetensors": mutate_weights,
    "gguf": mutate_gguf_file,
    "bombs": mutate_into_bomb,
    "files": mutate_any,
    "none": mutate_nothing,
}


if __name__ == "__main__":
    main(*sys.argv[1:])
