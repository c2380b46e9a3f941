"""Converted families in llama.cpp: each tiny checkpoint of tests/families as GGUF, loaded by its
own library, 24 greedy tokens of a text in F32 beside ours, token for token; other types load.

    python benchmarks/converted.py [ROW ...] [--checkpoint FOLDER ...] [--mtmd-cli PATH]

Needs llama-cpp-python (LLAMA_CPP_LIB_PATH names another library). With llama-mtmd-cli, projectors
are run on a picture as well.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "families"), str(ROOT / "tests" / "support")]
PROMPT = "a red circle at the left, and a blue"
TOKENS, TYPES = 24, ("BF16", "Q8_0", "Q4_K_M", "IQ4_XS", "Q2_K")
WITHOUT = ("aya_vision", "llava_onevision")  # encoders that no GGUF holds
# In a process of its own: two OpenMP libraries do not go together.
ASK = """
import ctypes, json, sys
import llama_cpp.llama_cpp as l
path, ids, count, text = json.loads(sys.argv[1])
quiet = l.llama_log_callback(lambda level, text, _: None)
l.llama_log_set(quiet, ctypes.c_void_p(0))
l.llama_backend_init()
options = l.llama_model_default_params()
options.n_gpu_layers, options.use_extra_bufts = 0, False
model = l.llama_model_load_from_file(path.encode(), options)
if not model:
    sys.exit("does not load")
options = l.llama_context_default_params()
options.n_ctx = options.n_batch = 256
options.type_k = options.type_v = 0  # F32
options.flash_attn_type = 0
context = l.llama_init_from_model(model, options)
vocabulary = l.llama_model_get_vocab(model)
size = l.llama_vocab_n_tokens(vocabulary)
buffer, data = (l.llama_token * 4096)(), text.encode()
read = list(buffer[: l.llama_tokenize(vocabulary, data, len(data), buffer, 4096, False, True)])
answer, new = [], ids
for _ in range(count):
    tokens = (l.llama_token * len(new))(*new)  # which the batch points to
    if l.llama_decode(context, l.llama_batch_get_one(tokens, len(new))):
        sys.exit("cannot be decoded")
    logits = l.llama_get_logits_ith(context, -1)
    answer.append(max(range(size), key=lambda i: logits[i]))
    new = answer[-1:]
print(json.dumps([read, answer]))
"""


def ask(path: Path, ids: list[int], count: int) -> Any:
    """The tokens of PROMPT, and the answer to `ids`; or what went wrong."""
    words = json.dumps([str(path), ids, count, PROMPT])
    run = [sys.executable, "-c", ASK, words]
    ran = subprocess.run(run, capture_output=True, text=True, check=False, errors="replace")
    return json.loads(ran.stdout) if ran.returncode == 0 else (ran.stderr.strip()[-120:] or "ended")


def check(folder: Path, work: Path, text_only: bool, program: str | None) -> str:
    """What llama.cpp makes of a checkpoint's files, in a few words."""
    from mtmd.base.errors import ModelError
    from mtmd.checkpoint.open import open_checkpoint
    from mtmd.convert.gguf import convert_to_gguf
    from mtmd.model import Model
    from mtmd.options.load import LoadOptions

    checkpoint, path = open_checkpoint(folder), work / "model.gguf"
    try:
        written = convert_to_gguf(checkpoint, path, "F32", text_only=text_only)
    except ModelError as error:
        return f"refused ({str(error).rpartition(': ')[2][:90]})"
    with closing(Model(checkpoint, LoadOptions(dtype="fp32", context=256))) as model:
        ids = model.checkpoint.tokenizer.encode(PROMPT)
        answer = model.complete(ids, max_tokens=TOKENS, ignore_eos=True)
    theirs = ask(path, ids, TOKENS)
    if isinstance(theirs, str):
        return f"LLAMA.CPP: {theirs}"
    same = "equal" if theirs == [ids, list(answer.output_token_ids)] else "DIFFERENT"
    result = [f"{TOKENS} tokens {same}"]
    for kind in TYPES:
        other = work / f"{kind}.gguf"
        convert_to_gguf(checkpoint, other, kind, text_only=True)
        answered = ask(other, ids, 2)
        result.append(kind if not isinstance(answered, str) else f"{kind} FAILS: {answered}")
    if program and len(written) > 1:
        result.append(see(program, written[0].path, written[1].path, work))
    return ", ".join(result)


def see(program: str, model: Path, projector: Path, work: Path) -> str:
    """Whether llama-mtmd-cli reads a picture."""
    import numpy as np
    from PIL import Image

    picture = work / "picture.png"
    pixels = (np.arange(64 * 64 * 3) % 251).astype(np.uint8).reshape(64, 64, 3)
    Image.fromarray(pixels).save(picture)
    files = ["-m", model, "--mmproj", projector, "--image", picture]
    how = ["-p", "red", "-n", "4", "--temp", "0", "-c", "2048", "--chat-template", "chatml"]
    run = [program, *map(str, files), *how]
    ran = subprocess.run(run, capture_output=True, text=True, check=False, errors="replace")
    wrong = [line for line in ran.stderr.splitlines() if "ASSERT" in line or "error" in line]
    return "pictures" if ran.returncode == 0 else f"PICTURES FAIL: {(wrong or [''])[0][-160:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--checkpoint", action="append", default=[], type=Path)
    parser.add_argument("--mtmd-cli")
    args = parser.parse_args()
    from table import ROWS

    cases = [(folder.parent.name, "", folder) for folder in args.checkpoint]
    rows = args.rows or ([] if cases else ROWS)
    cases += [(row, variant, None) for row in rows for variant in ROWS[row].variants]
    for row, variant, folder in cases:
        with TemporaryDirectory() as name:
            work = Path(name)
            made = folder or ROWS[row].variants[variant](work / "hf").folder
            result = check(made, work, row in WITHOUT, args.mtmd_cli)
            print(f"| {row} | {variant} | {result} |", flush=True)


if __name__ == "__main__":
    main()
