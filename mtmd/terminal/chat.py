"""The conversation behind `mtmd chat`: what is said goes to the model, what begins with a slash is
done here.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mtmd.base.errors import MtmdError, OptionError
from mtmd.base.text import one_line, plural
from mtmd.events import Answer, Finished, Progress, TextPiece, ThinkingPiece
from mtmd.llm.sampling.options import AppliedSampling
from mtmd.model import Model
from mtmd.options.answer import CONVERSATION, TOKENS_MAX, AnswerOptions
from mtmd.options.by_name import options
from mtmd.prompt.picture_paths import IMAGE_SUFFIXES, VIDEO_SUFFIXES
from mtmd.prompt.url_kinds import is_url
from mtmd.receipt import Receipt
from mtmd.terminal.line_input import (
    interruptible,
    leading_paths,
    path_of,
    without_echo_of_keys,
    words_of,
)
from mtmd.terminal.status_line import Status
from mtmd.terminal.transcript import (
    Attachment,
    Transcript,
    Turn,
    attach,
    read_transcript,
    write_text,
)
from mtmd.terminal.wrap import DIM, StreamedText, styled, wrapped

HELP = {
    "image": (
        "PATH...",
        "attach pictures or videos, files or URLs, to the next question; one dropped on the window "
        "does the same",
    ),
    "images": ("", "list what is attached"),
    "clear": ("", "start a new conversation"),
    "undo": ("", "remove the last question and its answer"),
    "retry": ("", "answer the last question again"),
    "system": ("TEXT", "the system message; without TEXT, none"),
    "set": (
        "NAME VALUE",
        "an answer option, like temperature 0.7; default puts it back; without NAME, show those "
        "that are changed most; all shows the others, too",
    ),
    "receipt": ("", "what the last answer is made of: pictures, tokens, times, device"),
    "save": ("FILE", "write the conversation to FILE.json, or FILE.md to be read"),
    "load": ("FILE.json", "go on with a conversation that was saved"),
    "help": ("", "this"),
    "quit": ("", "leave; so do /exit, /bye and Ctrl-D"),
}
LEAVE = ("quit", "exit", "bye")  # as other programs have it, too
NOTES = (
    "Ctrl-C stops an answer. A line that ends with \\ goes on in the next; "
    '""" begins and ends a text of several lines.'
)
CHANGED_MAX = ("temperature", "top_p", "top_k", "repetition_penalty", "max_tokens", "seed")
# options whose effect a terminal does not show
NOT_HERE = (
    *("logprobs", "prompt_logprobs", "continue_final_message"),
    *("tools", "tool_choice", "parallel_tool_calls"),
)


class CommandError(MtmdError):
    """Something that was entered makes no sense here."""


class Chat:
    """`chosen` are fields of `AnswerOptions`; with `interactive`, Ctrl-C ends no more than an
    answer. `failed` tells whether anything went wrong.
    """

    def __init__(
        self, model: Model, chosen: dict[str, Any], system: str = "", interactive: bool = False
    ):
        self.model, self.chosen, self.interactive, self.failed = model, chosen, interactive, False
        self.transcript, self._remote = Transcript(system), model.options.allow_remote_media
        self.attached: list[Attachment] = []
        self.last: Receipt | None = None
        """Of the last answer."""
        self._files: set[Path] = set()
        """Those of this conversation, which may be written again."""
        self._sampling_shown = ""

    def enter(self, text: str) -> bool:
        """Do what was entered. False to leave. What goes wrong is told in one line."""
        try:
            return self._do(text)
        except MtmdError as error:
            self.complain(str(error))
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            self.complain("interrupted")
        return True

    def complain(self, text: str) -> None:
        self.failed = True
        print(wrapped(f"mtmd chat: {one_line(text)}", sys.stderr), file=sys.stderr, flush=True)

    def _do(self, text: str) -> bool:
        paths, rest = leading_paths(text, (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES))
        if paths:
            self._attach(paths)
        elif text.startswith("/"):
            return self._command(text)
        if rest.strip():
            self._ask(rest.strip())
        return True

    def _command(self, text: str) -> bool:
        name, _, value = text[1:].partition(" ")
        if name in LEAVE:
            return False
        if name not in HELP:
            raise CommandError(
                f"/{name:.40} is not a command; /help lists them. Start a "
                "question with a space if it begins with a slash"
            )
        getattr(self, f"_{name}")(value.strip())
        return True

    def _help(self, _: str) -> None:
        for name, (value, text) in HELP.items():
            _say(f"/{name} {value}".ljust(20) + text, " " * 20)
        _say(NOTES)

    def _image(self, value: str) -> None:
        words = words_of(value)
        if len(words) > 1 and _is_file(value):  # blanks in it, and no quotation marks
            words = [value]
        paths = [word if is_url(word) else path_of(word) for word in words]
        if not paths:
            raise CommandError(
                "/image: found no path, expected that of a picture, in quotation marks if it has "
                "blanks"
            )
        self._attach(paths)

    def _attach(self, sources: Sequence[Path | str]) -> None:
        """All of them, or none where one cannot be used."""
        if not self.model.loaded.encoders:
            raise CommandError(
                f"{self.model.name} has no image encoder; {self.model.checkpoint.without_vision}"
            )
        self.attached += [attach(source, self._remote) for source in sources]
        self._images("")

    def _images(self, _: str) -> None:
        for number, turn in enumerate(self.transcript.turns, 1):
            for image in turn.images:
                _say(f"question {number}: {_described(image)}")
        for image in self.attached:
            _say(f"attached: {_described(image)}")
        if not (self.attached or any(turn.images for turn in self.transcript.turns)):
            _say("no image; /image PATH attaches one")

    def _clear(self, _: str) -> None:
        self.transcript, self.attached, self.last, self._files = (
            Transcript(self.transcript.system),
            [],
            None,
            set(),
        )
        _say("a new conversation")

    def _undo(self, _: str) -> None:
        turn = self._take_back()
        _say(
            f"taken back: {turn.question}"
            + (f" (attached again: {len(turn.images)})" if turn.images else "")
        )

    def _take_back(self) -> Turn:
        if not self.transcript.turns:
            raise CommandError("there is no question yet")
        turn = self.transcript.turns.pop()
        self.attached = [*turn.images, *self.attached]
        self.last = None
        return turn

    def _retry(self, _: str) -> None:
        later, last, requested = self.attached, self.last, len(self.transcript.turns)
        self.attached = []
        turn = self._take_back()
        try:
            self._ask(turn.question)
        finally:
            self.attached = later
            if len(self.transcript.turns) < requested:
                self.transcript.turns.append(turn)
                self.last = last

    def _system(self, value: str) -> None:
        self.transcript.system = value
        _say(f"system: {value}" if value else "no system text")

    def _set(self, value: str) -> None:
        name, _, text = value.partition(" ")
        names = [f.name for f in dataclasses.fields(AnswerOptions) if f.name not in NOT_HERE]
        if name == "all":
            name = ""
        elif not name:
            names, others = list(CHANGED_MAX), len(names) - len(CHANGED_MAX)
        if name and name not in names:
            raise OptionError(
                f"option {name!r:.60} is not known; expected one of {', '.join(names)}"
            )
        if text:
            chosen = {k: v for k, v in self.chosen.items() if k != name}
            if text.strip() != "default":
                chosen[name] = _value(text.strip())
            options(AnswerOptions, chosen)
            self.chosen = chosen
        settings = self._settings()
        for one in [name] if name else names:
            _say(f"{one} {_setting(settings, one)}")
        if not value:
            _say(f"(/set all shows {others} more, such as stop and json_schema)")

    def _settings(self) -> AnswerOptions:
        """Return what was chosen, and the model's own settings for the rest."""
        return self.model.loaded.answer_options(CONVERSATION | self.chosen)

    def _save(self, value: str) -> None:
        path = self._file(value, (".json", ".md"))
        if path.exists() and path not in self._files:
            raise CommandError(f"{path}: found a file there already; name another")
        model, transcript = self.model.name, self.transcript
        write_text(
            path,
            transcript.to_markdown(model)
            if path.suffix == ".md"
            else transcript.to_json(model, self.chosen),
        )
        self._files.add(path)
        _say(f"saved: {path}")

    def _load(self, value: str) -> None:
        path = self._file(value, (".json",))
        transcript, chosen, notes = read_transcript(path, self._remote)
        options(AnswerOptions, chosen)
        self.transcript, self.chosen, self.attached, self.last, self._files = (
            transcript,
            chosen,
            [],
            None,
            {path},
        )
        _say(f"loaded: {plural(len(transcript.turns), 'question')}")
        for note in notes:
            self.complain(note)

    def _file(self, value: str, endings: tuple[str, ...]) -> Path:
        words = words_of(value)
        if len(words) != 1 or not words[0].lower().endswith(endings):
            raise CommandError(
                f"found {value!r:.60}, expected a file ending in {' or '.join(endings)}"
            )
        return path_of(words[0]).absolute()

    def _receipt(self, _: str) -> None:
        if self.last is None:
            raise CommandError("there is no answer yet")
        _say(str(self.last))

    def _ask(self, question: str) -> None:
        """Answer a question. Where that fails, it is as if it had not been asked."""
        settings = self._settings()
        turn = Turn(question, tuple(self.attached))
        self.transcript.turns.append(turn)
        self.attached = []
        try:
            answer = self._answer(settings)
        except BaseException:
            self._take_back()
            raise
        if not answer.text and answer.receipt.finish == "cancelled":
            self._take_back()
            self.complain("stopped before the first word; the question is removed")
            return
        turn.answer, turn.thought = answer.text, answer.thinking
        turn.receipt, self.last = answer.receipt.asdict(), answer.receipt
        for note in self._notes(answer.receipt, settings):
            shown = styled(wrapped(f"({note})", sys.stderr), DIM, sys.stderr)
            print(shown, file=sys.stderr, flush=True)

    def _notes(self, receipt: Receipt, settings: AnswerOptions) -> Iterator[str]:
        """Yield what is said below an answer: for a person how fast it came, and, once, how its
        tokens were chosen; for everybody why it ended early.
        """
        if self.interactive and receipt.output_tokens:
            fast = receipt.output_tokens / receipt.decode_ms * 1e3 if receipt.decode_ms else 0.0
            tokens = plural(receipt.output_tokens, "token")
            yield f"{tokens}{f', {fast:.0f} tokens/s' if fast else ''}"
            if receipt.sampling_text != self._sampling_shown:
                self._sampling_shown = receipt.sampling_text
                yield receipt.sampling_text or "the most probable token each time"
        if receipt.finish == "cancelled":
            yield "stopped"
        elif receipt.repeated_tokens and settings.stop_repeating:
            yield f"stopped, as the last {receipt.repeated_tokens:,} tokens say the same"
        elif receipt.repeated_tokens:
            yield (
                f"the last {receipt.repeated_tokens:,} tokens say the same again and again; /set "
                "repetition_penalty 1.1 helps, and /set stop_repeating true ends such an answer"
            )
        if receipt.finish != "length":
            return
        context = self.model.runner.context
        if receipt.prompt_tokens + receipt.output_tokens >= context:
            yield (
                f"the context of {context:,} tokens is full; /clear starts a new conversation, and "
                "'mtmd chat --context N' has room for a longer one, where the model has"
            )
        else:
            written = plural(receipt.output_tokens, "token")
            yield f"ended at {written}; /set max_tokens N allows more"

    def _answer(self, settings: AnswerOptions) -> Answer:
        """The answer, shown as it comes."""
        status, text, shown = Status(), StreamedText(), False
        thought = StreamedText(is_thought=True)
        with without_echo_of_keys(), interruptible(self.interactive) as interrupt:
            ticket = self.model.service.submit_checked(self.transcript.messages(), settings)
            interrupt.calls(ticket.cancel)
            try:
                for event in ticket:
                    if isinstance(event, Progress):
                        status.show(event)
                    elif isinstance(event, ThinkingPiece):
                        status.clear()
                        thought.write(event.text)
                    elif isinstance(event, TextPiece):
                        status.clear()
                        if thought.begun:
                            thought.end()
                        shown = True
                        text.write(event.text)
                    elif isinstance(event, Finished):
                        shown = shown or event.answer.receipt.finish != "cancelled"
                        return event.answer
            finally:
                status.clear()
                if thought.begun:
                    thought.end()
                if shown:
                    text.end()
        raise AssertionError("a ticket ends with Finished, or raises")


def _described(image: Attachment) -> str:
    return f"{image.name} ({image.reported})"


def _value(text: str) -> Any:
    """JSON where it is that, else the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _setting(settings: AnswerOptions, name: str) -> str:
    """The value of an option, where it comes from, and whether it does anything."""
    value, applied = getattr(settings, name), settings.sampling
    assert isinstance(applied, AppliedSampling)  # made so for this model
    if name == "sampling":
        return json.dumps(applied.way)
    if name == "max_tokens" and value == TOKENS_MAX:
        return "-1 (to the end of the context)"
    if name == "seed" and value is None:
        return "null (a new one for each answer)"
    shown = json.dumps(value)
    if name in applied.names:
        return f"{shown} ({applied.settings.source})"
    if name in settings.without_effect:
        return (
            f"{shown} (no effect at temperature 0, which uses the most probable "
            "token; /set temperature 0.7 samples)"
        )
    return shown


def _is_file(path: str) -> bool:
    try:
        return path_of(path).is_file()
    except (OSError, ValueError):
        return False


def _say(text: str, indent: str = "") -> None:
    print(wrapped(text, indent=indent), flush=True)
