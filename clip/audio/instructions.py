"""Instructions by which a model transcribes and translates audio."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Instructions:
    """Prompts that a model was trained to transcribe and translate by, in which `{language}` is the
    English name of one.

    Args:
        transcribe: where no language is named.
        transcribe_in: where one is.
        translate: into a language.
        seconds: length of audio for one answer; longer audio is cut into pieces.
        rate: samples a second that the model takes.
        heading: what stands between what a model says of the audio first, such as its language, and
            the text; empty for one that says the text alone.
        begun: what the answer begins with where a language is named, the heading with it.
        hint_is_system: words that may occur are the system message, and nothing else is said of
            them; otherwise they are a part of the prompt.
        sentences: beginnings of a sentence in which the model quotes the text.
        system: the system message of a transcript; none where it is empty.
        audio_last: the audio stands behind the prompt, not before it.
    """

    transcribe: str
    transcribe_in: str
    translate: str
    seconds: float
    rate: int = 16_000
    heading: str = ""
    begun: str = ""
    hint_is_system: bool = False
    sentences: tuple[str, ...] = ()
    system: str = ""
    audio_last: bool = False


# In the words of Qwen2.5-Omni's and Qwen3-Omni's authors.
OMNI = Instructions(
    transcribe="Transcribe the audio into text.",
    transcribe_in="Transcribe the {language} audio into text.",
    translate="Listen to the provided audio and produce a translation in {language} text.",
    seconds=30.0,
)
