"""Chat templates: messages to the text a checkpoint was trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError, PromptError
from mtmd.base.files import open_regular
from mtmd.base.spelling import did_you_mean_path
from mtmd.base.text import json_object, one_line
from mtmd.chat_template.built_in_templates import how_to_give_one
from mtmd.chat_template.jinja_sandbox import SafeTemplate

FILE_BYTES_MAX = 16 << 20


class ChatTemplate:
    """A compiled template. It may be used from several threads. `missing` says what to do about a
    checkpoint that has none, "" for one that has.
    """

    def __init__(self, source: str, special: Mapping[str, str], name: str) -> None:
        """`special`: `bos_token` and so on with their spellings; `name` is used in errors. Raises
        ModelError for a broken template.
        """
        self.source, self._special = source, dict(special)
        self.missing = ""
        self._template = SafeTemplate(source, name)

    @classmethod
    def none(cls, missing: str) -> ChatTemplate:
        """Return what stands in the place of a template that is not there: it renders nothing, and
        refuses every conversation with `missing`.
        """
        template = cls("", {}, "")
        template.missing = missing
        return template

    @classmethod
    def from_file(cls, path: Path, special: Mapping[str, str]) -> ChatTemplate:
        """The template in a file of its own. Raises ModelError if it cannot be read or used."""
        return cls(_read_text(path), special, str(path))

    @classmethod
    def from_folder(
        cls, folder: Path, special: Mapping[str, str], knows: Callable[[str], bool]
    ) -> ChatTemplate:
        """The template of a checkpoint folder; for one without, that of `none`, which names the
        places looked at. `knows`: whether the vocabulary has a special token.
        """
        path = folder / "chat_template.jinja"
        if path.exists():
            return cls(_read_text(path), special, str(path))
        for file in ("chat_template.json", "tokenizer_config.json"):
            path = folder / file
            source = (
                json_object(_read_text(path), path).get("chat_template") if path.exists() else None
            )
            if isinstance(source, list):
                source = next(
                    (
                        t.get("template")
                        for t in source
                        if isinstance(t, dict) and t.get("name") == "default"
                    ),
                    None,
                )
            if isinstance(source, str):
                return cls(source, special, f"{path}: chat_template")
        return cls.none(
            f"{folder.name} has no chat template (looked for chat_template.jinja, "
            "chat_template.json and 'chat_template', a string or a list with one named default, in "
            f"tokenizer_config.json): {how_to_give_one(knows)}"
        )

    @property
    def variables(self) -> frozenset[str]:
        """The names of all variables that it reads."""
        return self._template.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """The prompt text. `extra` are further variables for the template, made of JSON types.

        Messages are {"role", "content"}; a content is a string or a list of {"type": "text",
        "text": ...} and {"type": "image"}, checked and sealed by `read_conversation`: they are put
        in as they are. Raises PromptError for messages that the template refuses, and
        where there is no template, ModelError for a template that misbehaves.
        """
        if self.missing:
            raise PromptError(self.missing)
        variables = {
            "tools": None,
            "documents": None,
            **self._special,
            **{key: _plain(value, key) for key, value in extra.items()},
            "messages": _plain(messages, "messages"),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._template.render(variables)


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON types: other objects have methods that the sandbox does not know."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    raise PromptError(
        f"template variable {where!r} holds a {type(value).__name__}; expected JSON types"
    )


def _read_text(path: Path) -> str:
    try:
        with open_regular(path) as file:
            data = file.read(FILE_BYTES_MAX + 1)
        if len(data) > FILE_BYTES_MAX:
            raise ModelError(
                f"{path} is larger than {FILE_BYTES_MAX >> 20} MiB, the maximum; is this "
                "the right file?"
            )
        return data.decode("utf-8")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ModelError(
            f"{path}: found no such file, expected a Jinja template{did_you_mean_path(path)}"
        ) from error
    except (OSError, UnicodeError) as error:
        raise ModelError(
            f"{path} cannot be read: {one_line(error, 300)}; expected UTF-8 text"
        ) from error
