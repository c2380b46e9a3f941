"""Tiny checkpoints whose answers are known, `golden/NAME` of a folder `shared` in the repository or
beside it: prompt ids and greedy tokens on the device are to be those that transformers gave on a
CPU in fp32.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from pathlib import Path

from gpu_kernels.package import ROOT
from gpu_kernels.rows import Row, Setting, SkipError, Task, WrongError

# A head of 72 and windows; features of several layers and three axes; the delta rule and experts
FIRST = ("gemma3", "qwen3_vl", "qwen3_next")
TITLE = "Golden checkpoints, against transformers on a CPU"


def tasks(setting: Setting) -> Iterator[Task]:
    """The first ones, and whatever others there are."""
    others = sorted(set(folders()) - set(FIRST))
    for name in (*FIRST, *others):
        yield Task(name, functools.partial(answered, name, setting), name in FIRST)


def folders() -> dict[str, Path]:
    parents = (ROOT / "shared", ROOT.parent / "shared")
    result = [file.parent for p in parents for file in p.glob("golden/*/expected.json")]
    return {folder.name: folder for folder in reversed(result)}


def answered(name: str, setting: Setting) -> Row:
    from mtmd import Finished, load
    from mtmd.prompt.conversation import user_message

    if (folder := folders().get(name)) is None:
        raise SkipError("it is not here: copy golden/ into a folder shared of the repository")
    expected = json.loads((folder / "expected.json").read_text())
    pictures = [folder / picture for picture in expected.get("images", ())]
    text = [{"type": "text", "text": expected["prompt"]}]
    message = (
        user_message(pictures, expected["prompt"])
        if pictures
        else {"role": "user", "content": text}
    )
    tokens = expected["greedy_token_ids"]
    model = load(folder / "hf", device=setting.device, dtype="fp32")
    *_, last = model.stream([message], max_tokens=len(tokens), ignore_eos=True)
    assert isinstance(last, Finished)
    if list(last.answer.prompt_token_ids) != expected["prompt_token_ids"]:
        raise WrongError("the prompt's ids are not transformers'")
    actual = list(last.answer.output_token_ids)
    if actual != tokens:
        pairs = enumerate(zip(actual, tokens, strict=False))
        first = next((n for n, (a, b) in pairs if a != b), min(len(actual), len(tokens)))
        raise WrongError(f"tokens are transformers' up to {first} of {len(tokens)}: {actual}")
    return Row({"checkpoint": name, "tokens equal": len(tokens)}, TITLE)
