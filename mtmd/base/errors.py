"""The error types of every folder. Each message says what was found, what was expected and what to
do.
"""

from __future__ import annotations

from copy import copy


class MtmdError(Exception):
    """Base of every error this package raises on purpose. Its text is one line, fit to be shown to
    a user: what names in files have of line breaks, control characters and halves of surrogate
    pairs is written as escapes.
    """

    def __init__(self, text: str) -> None:
        super().__init__(
            "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        )

    def reworded(self, text: str) -> MtmdError:
        """The same error with another text."""
        result = copy(self)
        result.args = (text,)
        return result


class ImageError(MtmdError):
    """An image that cannot be used: unreadable, truncated, too large."""


class VideoError(ImageError):
    """A video that cannot be used: unreadable, of no known kind, too long."""


class AudioError(ImageError):
    """An audio file that cannot be used: unreadable, of no known kind, too long."""


class LeftError(MtmdError):
    """Work was ended as who asked for it has left."""


class ModelError(MtmdError):
    """A checkpoint that cannot be used: missing, broken, of an unknown architecture."""


class DualEncoderError(ModelError):
    """The checkpoint gives vectors, where one is expected that writes."""


class RerankerError(DualEncoderError):
    """The checkpoint gives scores, where one is expected that writes."""


class OptionError(MtmdError):
    """An option or argument out of its range."""


class PromptError(MtmdError):
    """A prompt that cannot be answered: empty, or longer than the context."""


class ContextError(PromptError):
    """A prompt that does not fit: it takes `tokens`, None where it was too long to be counted, and
    the `context` holds so many, answer included. `advice`: what to do, "" where `text` says it.
    """

    def __init__(self, text: str, tokens: int | None, context: int, advice: str = "") -> None:
        super().__init__(f"{text}; {advice}" if advice else text)
        self.tokens, self.context, self.text, self.advice = tokens, context, text, advice

    def reworded(self, text: str) -> ContextError:
        """The same error with another text, which may end with its advice."""
        words = text.removesuffix(f"; {self.advice}")
        return ContextError(words, self.tokens, self.context, self.advice)

    def with_tools(self, number: int) -> ContextError:
        """The same for a prompt in which so many tools are described."""
        tools = "1 tool that is" if number == 1 else f"{number} tools that are"
        advice = f"send fewer tools than the {tools} described in it, or {self.advice}"
        return ContextError(self.text, self.tokens, self.context, advice)

    @property
    def is_short(self) -> bool:
        """Return whether the prompt does not fit because it takes no tokens at all."""
        return self.tokens is not None and self.tokens < self.context

    def __reduce__(self) -> tuple[type, tuple[str, int | None, int, str]]:
        """Return, for other processes, what makes it again takes four arguments."""
        return type(self), (self.text, self.tokens, self.context, self.advice)


class DeviceMemoryError(MtmdError):
    """A device has less memory left than what was asked of it needs."""


class DeviceError(MtmdError):
    """The device, or the thread that works on it, has failed or hangs: nothing can be answered any
    more by the model that was loaded.
    """


class EngineError(MtmdError):
    """The process that computes a model's answers has failed, and is being started again, which is
    done in about `retry_after_s`.
    """

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class PlacementError(MtmdError):
    """An op that no backend takes, or a device that is not there."""


class BusyError(MtmdError):
    """Too many requests wait already: nothing is wrong with this one, later it may be taken.
    `retry_after_s`: when there should be room.
    """

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s
