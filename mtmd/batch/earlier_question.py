"""Describes what the rows of a batch answer, kept beside them: a later run goes on with the same
question, or not at all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mtmd.base.errors import OptionError
from mtmd.llm.sampling.options import DRAWING, AppliedSampling
from mtmd.options.answer import AnswerOptions
from mtmd.prompt.url_kinds import is_url

ENDING = ".run.json"
LOADING = (
    *("dtype", "kv_type", "context", "mmproj", "chat_template"),
    *("image_min_tokens", "image_max_tokens"),
)
VERSION = 2  # 1 has no SAMPLING: models' own settings were not used
SAMPLING = "sampling"


def chosen(options: Any) -> dict[str, Any]:
    """Fields of a dataclass that are not as they are by default."""
    fields = dataclasses.fields(options)
    given = {f.name: getattr(options, f.name) for f in fields}
    return {f.name: given[f.name] for f in fields if given[f.name] != f.default}


def requested(
    model: str | None,
    prompt: str,
    system: str,
    loading: Mapping[str, Any],
    answering: Mapping[str, Any],
    frames: Mapping[str, Any],
) -> dict[str, Any]:
    """Return what makes rows what they are. `loading`, `answering`, `frames`: what was chosen of
    `LoadOptions`, `AnswerOptions` and `FrameRequest`.
    """
    return {
        "model": model,
        "prompt": prompt,
        "system": system,
        "model options": {name: loading[name] for name in LOADING if name in loading},
        "answer options": dict(answering),
        "frames": dict(frames),
    }


def own_sampling(answering: AnswerOptions) -> dict[str, float]:
    """Return the model's own settings that take part in choosing tokens, from options that are
    resolved for it. Those for drawing take none where the most probable token is taken.
    """
    applied = answering.sampling
    names = applied.names if isinstance(applied, AppliedSampling) else ()
    draws = answering.temperature > 0
    return {n: getattr(answering, n) for n in names if draws or n not in DRAWING}


def check_same(out: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises OptionError."""
    for name, value in now.items():
        if before.get(name) != value:
            raise OptionError(
                f"out {out}: found rows with {name} {before.get(name)!r:.80}, now it is "
                f"{value!r:.80}; expected the same: name another file"
            )


class EarlierRun:
    """Question that the rows in `out` answer: OUT.run.json. `has_rows`: else what is there is not
    theirs. Raises OptionError where they answer something else.
    """

    def __init__(self, out: Path, now: Mapping[str, Any], has_rows: bool):
        self.path, self.note = out.with_name(out.name + ENDING), ""
        self._out, self._version, self._sampling = str(out), VERSION, dict[str, Any]()
        self._now = dict(json.loads(json.dumps(now, default=str)))
        self._is_there = has_rows and self.path.exists()
        self.folder, self.began = str(Path.cwd()), 0.0
        """Names of rows are relative to this folder; when the first run began, 0 if not known."""
        if self._is_there:
            self._read(out)
        elif has_rows:
            self.note = (
                f"{self.path.name} is not there: it is not known whether the "
                "existing rows answer the same question"
            )

    def check_sampling(self, now: Mapping[str, float]) -> None:
        """Check the model's own settings, which are known once it is loaded, against those of the
        rows. Raises OptionError where they differ.
        """
        self._now[SAMPLING] = dict(now)
        if not self._is_there or self._sampling == self._now[SAMPLING]:
            return
        if self._version < 2:
            settings = ", ".join(f"{name} {value:g}" for name, value in now.items())
            raise OptionError(
                f"out {self._out}: found rows of a version that did not use the model's own "
                f"settings ({settings}), expected the same; go on without them by --sampling off, "
                "or name another file"
            )
        before = {SAMPLING: self._sampling}
        check_same(self._out, before, {SAMPLING: self._now[SAMPLING]})

    def keep(self) -> None:
        """Before the first row is written."""
        if self._is_there:
            return
        began = 0.0 if self.note else time.time()
        saved = {"version": VERSION, "began": began, "folder": self.folder, **self._now}
        made = self.path.with_name(self.path.name + ".new")
        try:
            made.write_text(json.dumps(saved, ensure_ascii=False, indent=1) + "\n", "utf-8")
        except OSError as error:
            error.filename = error.filename or str(made)
            raise
        made.replace(self.path)
        self._is_there = True

    def _read(self, out: Path) -> None:
        try:
            before = dict(json.loads(self.path.read_text("utf-8")))
            self.folder, self.began = str(before["folder"]), float(before["began"])
            self._version, self._sampling = int(before["version"]), dict(before.get(SAMPLING, {}))
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise OptionError(
                f"out {out}: found content in {self.path.name} that `mtmd "
                "batch` did not write, expected the question; restore it, "
                "remove it if the rows answer the same question, or name "
                "another file"
            ) from error
        check_same(str(out), before, self._now)


def name_of_model(model: str | None) -> str:
    """However a path to it is written."""
    if model is None:
        return "demo"
    path = Path(model).expanduser()
    return str(path.resolve()) if path.exists() else model


def location_of(name: str, folder: str) -> str:
    """Return where a picture lies that `folder`, a whole path, names so, however that is written. A
    link to a picture is one of its own. The name of a URL is its own place.
    """
    if is_url(name):
        return name
    head, tail = os.path.split(os.path.join(folder, name))  # noqa: PTH118  # ".." after links
    return f"{real_folder(head)}/{tail}"


@cache
def real_folder(path: str) -> str:
    """Return the real folder of a whole path, with no links in it."""
    return os.path.realpath(path)
