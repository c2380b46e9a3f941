"""Defaults that Ollama stores beside a model's weights: a system prompt and parameters, layers of
its manifest (ollama/ollama, docs/modelfile.md).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.base.files import open_regular
from mtmd.base.text import one_line, printable
from mtmd.checkpoint.checkpoint import Checkpoint
from mtmd.checkpoint.sampling import of_ollama

BYTES_MAX = 1 << 20
SHOWN_CHARS = 60


def with_ollama_defaults(
    checkpoint: Checkpoint, system: Path | None, parameters: Path | None, model: str
) -> Checkpoint:
    """The checkpoint with the system prompt and the parameters of two of Ollama's blobs. Stop texts
    that are special tokens end answers. Raises ModelError for a blob that holds something else.
    """
    if system is not None:
        text = _text(system, model).strip()
        shown = printable(one_line(text, SHOWN_CHARS))
        note = f"system prompt of {model}, for conversations without one: {shown}"
        notes = (*checkpoint.notes, note) if text else checkpoint.notes
        checkpoint = replace(checkpoint, system=text, notes=notes)
    if parameters is not None:
        values = _values(parameters, model)
        special = {text: i for text, i in checkpoint.tokenizer.silent.items() if text}
        texts = values.get("stop", ())
        stops = [t for t in texts if isinstance(t, str)] if isinstance(texts, list) else []
        values["stop"] = [text for text in stops if text not in special]
        ends = checkpoint.stop_tokens | {special[text] for text in stops if text in special}
        sampling = of_ollama(values, f"the parameters of {model}")
        own = checkpoint.sampling if not sampling.values else sampling
        checkpoint = replace(checkpoint, stop_tokens=ends, sampling=own)
    return checkpoint


def _text(blob: Path, model: str) -> str:
    try:
        with open_regular(blob) as file:
            data = file.read(BYTES_MAX + 1)
        if len(data) <= BYTES_MAX:
            return data.decode()
    except (OSError, UnicodeDecodeError):
        pass
    raise ModelError(
        f"model {model!r}: {blob} is missing or is no text of at most {BYTES_MAX >> 20} MiB, which "
        f"its manifest says; `ollama pull {model.partition(':')[2]}` fetches it again"
    )


def _values(blob: Path, model: str) -> dict[str, Any]:
    try:
        values = json.loads(_text(blob, model))
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, Mapping):
        raise ModelError(
            f"model {model!r}: {blob} holds no JSON object of parameters; "
            f"`ollama pull {model.partition(':')[2]}` fetches it again"
        )
    return dict(values)
