"""Chat templates by name, for checkpoints that have none (`--chat-template chatml`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

_FOLDER = Path(__file__).parent / "built_in"


@dataclass(frozen=True)
class BuiltIn:
    """A template of this package. `marks`: special tokens that it writes, by which a vocabulary
    made for it is known; `end`: the one that ends a turn, None for the end-of-sequence token.
    """

    marks: tuple[str, ...] = ()
    end: str | None = None


# More marks before fewer: the first whose marks a vocabulary has is suggested.
BUILT_IN: Mapping[str, BuiltIn] = {
    "llama3": BuiltIn(("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"), "<|eot_id|>"),
    "llama4": BuiltIn(("<|header_start|>", "<|header_end|>", "<|eot|>"), "<|eot|>"),
    "granite": BuiltIn(("<|start_of_role|>", "<|end_of_role|>"), "<|end_of_text|>"),
    "deepseek": BuiltIn(("<｜User｜>", "<｜Assistant｜>"), "<｜end▁of▁sentence｜>"),
    "gemma": BuiltIn(("<start_of_turn>", "<end_of_turn>"), "<end_of_turn>"),
    "phi3": BuiltIn(("<|user|>", "<|assistant|>", "<|end|>"), "<|end|>"),
    "chatml": BuiltIn(("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "mistral": BuiltIn(("[INST]", "[/INST]")),
    "zephyr": BuiltIn(("<|user|>", "<|assistant|>")),
    "vicuna": BuiltIn(),
    "alpaca": BuiltIn(),
}


def template_file(given: str | os.PathLike[str]) -> Path:
    """Return the file of what `chat_template` names: a built-in template, unless there is a file
    of that name.
    """
    path = Path(given).expanduser()
    return built_in_file(str(given)) if str(given) in BUILT_IN and not path.is_file() else path


def built_in_file(name: str) -> Path:
    """Return the file of a built-in template."""
    return _FOLDER / f"{name}.jinja"


def end_of_turn(file: Path) -> str | None:
    """Return the token that ends a turn, where `file` is that of a built-in template."""
    built_in = BUILT_IN.get(file.stem) if file.parent == _FOLDER else None
    return built_in.end if built_in else None


def fitting(knows: Callable[[str], bool]) -> str | None:
    """Return the built-in template that a vocabulary was made for; `knows` says whether it has a
    special token.
    """
    named = (name for name, one in BUILT_IN.items() if one.marks and all(map(knows, one.marks)))
    return next(named, None)


def how_to_give_one(knows: Callable[[str], bool]) -> str:
    """Return what to do about a checkpoint without a chat template; `knows` says whether its
    vocabulary has a special token, by which a built-in template is suggested.
    """
    fits = fitting(knows)
    advice = (
        f"its vocabulary was made for {fits!r}: --chat-template {fits} (chat_template={fits!r})"
        if fits
        else "give one with --chat-template (chat_template=): a Jinja file, or one of "
        f"{', '.join(BUILT_IN)}"
    )
    return f"{advice}; or have a text continued as it is: /v1/completions, model.complete(text)"
