"""Goes from messages to what the decoder reads: a conversation checked and rendered, its pictures
prepared, all of it tokenized; and, once the pictures are encoded, its spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

from torch import Tensor

from mtmd.base.errors import ContextError, PromptError
from mtmd.base.text import plural
from mtmd.chat_template.text_check import THOUGHTS_LEFT_OUT
from mtmd.clip.audio.recording import Recording
from mtmd.clip.family import in_line
from mtmd.clip.image.decode import Picture
from mtmd.clip.video.footage import Footage
from mtmd.kernels.plan.executor import Observer
from mtmd.llm.engine.spans import Span
from mtmd.llm.tokenizer.control_tokens import SEAL
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.prompt.audio_input import load_audio
from mtmd.prompt.bridge import Bridge, Prepared, PreparedAudio, PreparedVideo, Shown, Single, flat
from mtmd.prompt.conversation import (
    Conversation,
    Message,
    RawPrompt,
    read_conversation,
    with_own_system,
)
from mtmd.prompt.conversation_text import ConversationText
from mtmd.prompt.fetch_url import RemoteMedia
from mtmd.prompt.load_image import load_image, load_isolated
from mtmd.prompt.pieces import Piece
from mtmd.prompt.video_input import load_video
from mtmd.prompt.videos import NOT_SHOWN, ShownVideo, Videos, in_place_of_videos
from mtmd.receipt import VideoReceipt
from mtmd.thinking.history import FIELD, with_thoughts, without_thoughts
from mtmd.thinking.probe import ThinkingTemplate, read_thinking
from mtmd.thinking.prompt_end import PromptEnd
from mtmd.thinking.request import ThinkingRequest
from mtmd.thinking.switches import choose
from mtmd.tools.history import sealed
from mtmd.tools.tool import Toolbox

NO_TOOLS = Toolbox()
NOTHING_REQUESTED = ThinkingRequest()
T = TypeVar("T")


@dataclass(frozen=True)
class PreparedPrompt:
    """A conversation tokenized, its pictures, groups of frames and audio ready to be encoded, in
    order.
    `notes` say what was done to it that its owner may not expect. `shown` are the pictures,
    audio and `PreparedVideo`s that those are of.
    """

    pieces: list[Piece]
    pictures: list[Single]
    notes: tuple[str, ...] = ()
    shown: tuple[Shown, ...] = ()
    videos: tuple[VideoReceipt, ...] = ()
    images: tuple[Prepared, ...] = ()
    """Those of the `pictures` that are not of a video."""
    audio: tuple[PreparedAudio, ...] = ()
    """Those of the `pictures` that are audio, the sound of videos behind all else."""
    inside_thought: bool | None = None
    """Whether it ends inside a thought; None where the answer has none."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for piece in self.pieces for t in piece.tokens)


@dataclass(frozen=True)
class EncodedPrompt:
    """A conversation ready for the decoder: its pictures encoded, embeddings [T, D] of each, and
    all of it as spans.
    """

    spans: list[Span]
    pictures: list[Single]
    embeddings: list[Tensor]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(t for s in self.spans for t in s.tokens)


class Prompts:
    """The prompts of one loaded model, with the cache of its encoded pictures."""

    def __init__(self, loaded: LoadedModel):
        self._loaded = loaded
        self.bridge = Bridge(
            loaded.encoder,
            loaded.checkpoint.tokenizer,
            loaded.admission,
            loaded.audio_encoder,
            loaded.checkpoint.text.image_width,
            loaded.checkpoint.instruction_tokenizer,
        )
        self.videos = Videos(loaded, self.bridge)

    @property
    def load_image(self) -> Callable[..., Picture]:
        """Return how files become pictures: in this process, or, for a model that isolates, in
        others. All that one has to fetch shares a deadline.
        """
        return self._loaders[0]

    @property
    def load_recording(self) -> Callable[..., Recording]:
        """Return how audio files become recordings, which are decoded later."""
        return self._loaders[2]

    @property
    def _loaders(
        self,
    ) -> tuple[Callable[..., Picture], Callable[..., Footage], Callable[..., Recording]]:
        """Do what `load_image` does, for pictures, videos and audio."""
        options = self._loaded.options
        remote = RemoteMedia() if options.allow_remote_media else None
        load = partial(load_isolated if options.isolate else load_image, remote=remote)
        return (
            load,
            partial(load_video, isolate=options.isolate, load=load, remote=remote),
            partial(load_audio, isolate=options.isolate, remote=remote),
        )

    def read(self, messages: Sequence[Message]) -> Conversation:
        """Pictures loaded, texts sealed. Raises PromptError, also for media that the model does not
        take, and ImageError.
        """
        loaded = self._loaded
        messages = with_own_system(messages, loaded.checkpoint.system)
        conversation = read_conversation(messages, loaded.checkpoint.tokenizer.seal, *self._loaders)
        counts = {"image": len(conversation.pictures), "video": len(conversation.videos)}
        given = [plural(n, what) for what, n in counts.items() if n]
        if given and loaded.encoder is None:
            hears = loaded.audio_encoder is not None
            advice = f"it takes {loaded.takes}" if hears else loaded.checkpoint.without_vision
            raise PromptError(
                f"{loaded.name} has no image encoder and was given {' and '.join(given)}; {advice}"
            )
        if (count := len(conversation.audio)) and loaded.audio_encoder is None:
            what = "audio" if count == 1 else f"{count} audio files"
            raise loaded.deaf(what)
        return conversation

    @cached_property
    def text(self) -> ConversationText:
        """Return what the chat template makes of conversations."""
        checkpoint, encoder = self._loaded.checkpoint, self._loaded.encoder
        tokenizer, family = checkpoint.tokenizer, encoder.family if encoder else None
        stops = [text for text, i in tokenizer.silent.items() if i in checkpoint.stop_tokens]
        video, audio = self.bridge.video, self.bridge.audio_encoder
        return ConversationText(
            self._render,
            tokenizer.seal,
            tuple(tokenizer.silent),
            stops,
            family.marker if family else None,
            family.marker.join(family.around) if family else None,
            video.markers[0] if video else "",
            audio.family.marker if audio else None,
            in_line(family or (audio.family if audio else None)),
        )

    @cached_property
    def thinking_template(self) -> ThinkingTemplate:
        """Return what the chat template and the vocabulary know of thoughts, found out when it is
        first needed.
        """
        template, tokenizer = self._loaded.checkpoint.template, self._loaded.checkpoint.tokenizer

        def render(messages: Sequence[Message], **more: Any) -> str:
            return template.render(self.text.forms.fit(messages), **more)

        return read_thinking(render, template.source, template.variables, tokenizer.added_spellings)

    def _render(self, messages: Sequence[Message], **more: Any) -> str:
        """Do what `ChatTemplate.render` does, for messages that may have thoughts."""
        if any(FIELD in message for message in messages):
            messages = with_thoughts(messages, self.thinking_template)
        return self._loaded.checkpoint.template.render(messages, **more)

    def prepare(
        self,
        messages: Sequence[Message],
        detail: str = "auto",
        anew: bool = False,
        salt: str = "",
        box: Toolbox = NO_TOOLS,
        open_end: bool = False,
        thinking: ThinkingRequest = NOTHING_REQUESTED,
        reserve: int = 0,
        counting: bool = False,
    ) -> PreparedPrompt:
        """A conversation ready for the device; nothing of it needs the device yet. `anew`: also
        pictures in the cache are to be encoded; `detail` "auto": as the messages have it; `salt`:
        pictures of another are not found there; `box`: tools that the answer may call; `open_end`:
        the answer goes on from the last message; `reserve`: tokens of the answer that videos are to
        leave room for, a quarter of the context at most; `thinking`: what is requested of the
        thought before the answer; `counting`: it is not encoded afterwards, and however long.
        Raises what `read` and `Bridge.prepare_media` do, VideoError, and ContextError for more
        messages than may fit.
        """
        if not counting:
            _check_number(messages, self._loaded.runner.context)
        conversation = self.read(messages)
        detail = conversation.detail if detail == "auto" else detail
        budget = replace(self._loaded.limits, detail=detail)
        encoder = self._loaded.encoder
        images = self.bridge.prepare(conversation.pictures, budget, anew, salt) if encoder else []
        seen = bool(conversation.pictures or conversation.videos)
        audio = [self.bridge.prepare_audio(one, anew, salt, seen) for one in conversation.audio]
        videos: list[ShownVideo] = []
        if conversation.videos:
            nothing = [NOT_SHOWN] * len(conversation.videos)
            bare = in_place_of_videos(conversation, images, nothing, audio)
            pieces, *_ = self._read(bare, box, open_end, thinking)
            context = self._loaded.runner.context
            room = context - min(reserve, context // 4) - sum(len(piece.tokens) for piece in pieces)
            videos = self.videos.show(conversation.videos, room, detail, anew, salt, counting)
        made = in_place_of_videos(conversation, images, videos, audio)
        try:
            pieces, shown, notes, inside = self._read(made, box, open_end, thinking)
        except PromptError:
            if not any(video.part["type"] == "video" for video in videos):
                raise
            # A template that knows no videos writes what stands around a picture.
            as_pictures = [video.as_picture for video in videos]
            made = in_place_of_videos(conversation, images, as_pictures, audio)
            pieces, shown, notes, inside = self._read(made, box, open_end, thinking)
        return PreparedPrompt(
            pieces,
            flat(shown),
            (*conversation.notes, *notes),
            tuple(shown),
            tuple(video.receipt for video in videos),
            tuple(images),
            (*audio, *(video.sound for video in videos if video.sound)),
            inside,
        )

    def _read(
        self,
        made: tuple[list[dict[str, Any]], list[Shown]],
        box: Toolbox,
        open_end: bool,
        thinking: ThinkingRequest,
    ) -> tuple[list[Piece], list[Shown], tuple[str, ...], bool | None]:
        messages, shown = made

        def read(text: str) -> list[Piece]:
            return self.bridge.read(self._with_markers(text, shown), shown)

        (pieces, inside), notes = self._written(messages, box, read, open_end, thinking)
        return pieces, shown, notes, inside

    def _written(
        self,
        messages: list[dict[str, Any]],
        box: Toolbox,
        read: Callable[[str], T],
        open_end: bool,
        thinking: ThinkingRequest,
    ) -> tuple[tuple[T, bool | None], tuple[str, ...]]:
        """Return what `read` makes of the prompt, whether that ends inside a thought, and notes."""
        seal = self._loaded.checkpoint.tokenizer.seal
        chosen = choose(thinking, self.thinking_template, lambda value: sealed(value, seal))
        end = PromptEnd(self.thinking_template.marks, chosen.closes, messages, open_end)
        variables = chosen.variables

        def read_end(text: str) -> tuple[T, bool | None]:
            text, inside = end.of(text)
            return read(text), inside

        def write(messages: Sequence[dict[str, Any]]) -> tuple[Any, tuple[str, ...]]:
            return self.text.write(messages, box, read_end, end.open_end, variables)

        try:
            made, notes = write(end.messages)
        except PromptError:
            if not any(FIELD in message for message in end.messages):
                raise
            # Some templates refuse a thought beside calls.
            made, notes = write(without_thoughts(end.messages))
            notes = (*notes, THOUGHTS_LEFT_OUT)
        return made, (*chosen.notes, *notes)

    def rendered(
        self,
        messages: Sequence[Message],
        box: Toolbox = NO_TOOLS,
        open_end: bool = False,
        thinking: ThinkingRequest = NOTHING_REQUESTED,
    ) -> str:
        """Return the text that `prepare` would tokenize, pictures as the template writes them.
        Raises what `read` does.
        """
        conversation = self.read(messages)
        pictures = len(conversation.pictures)
        marker = self._loaded.encoder.family.marker if self._loaded.encoder else ""

        def read(text: str) -> str:
            if pictures and not conversation.videos and text.count(marker) != pictures:
                raise PromptError(
                    f"the chat template wrote {text.count(marker)} picture places for {pictures} "
                    "pictures; it does not fit this model"
                )
            return text.replace(SEAL, "")

        (text, _), _ = self._written(list(conversation.messages), box, read, open_end, thinking)
        return text

    def _with_markers(self, rendered: str, shown: list[Shown]) -> str:
        """Return it with the markers of videos where those of pictures were written for all that is
        shown.
        """
        video, encoder = self.bridge.video, self._loaded.encoder
        if video is None or encoder is None:
            return rendered
        if any(isinstance(one, PreparedAudio) for one in shown):
            return rendered
        texts = rendered.split(encoder.family.marker)
        written = any(marker in rendered for marker in video.markers)
        if written or len(texts) - 1 != len(shown):
            return rendered
        markers = (
            video.markers[0] if isinstance(one, PreparedVideo) else encoder.family.marker
            for one in shown
        )
        return texts[0] + "".join(m + t for m, t in zip(markers, texts[1:], strict=True))

    def prepare_raw(self, prompt: RawPrompt) -> PreparedPrompt:
        """Raises PromptError for an empty one, and for tokens that are not the model's, or stand
        for pictures.
        """
        tokenizer = self._loaded.checkpoint.tokenizer
        tokens = prompt.text
        if isinstance(tokens, str):
            tokens = tuple(tokenizer.encode_prompt(tokens))
        if not all(isinstance(token, int) for token in tokens):
            raise PromptError(
                "prompt: found what is no token's id, expected a text or a list of ids"
            )
        if not tokens:
            raise PromptError("the prompt is empty; give the text to continue")
        if not 0 <= min(tokens) <= max(tokens) < len(tokenizer):
            raise PromptError(
                f"prompt: found token {min(tokens) if min(tokens) < 0 else max(tokens)}, expected "
                f"ids from 0 to {len(tokenizer) - 1}"
            )
        if {tokenizer.id(token) for token in self.bridge.tokens} & set(tokens):
            raise PromptError(
                "prompt: found a token that stands for a picture or audio; send messages"
            )
        return PreparedPrompt([Piece(tokens)], [])

    def encode(self, prompt: PreparedPrompt, observe: Observer | None = None) -> EncodedPrompt:
        """Encode its pictures, one after another, every node shown to `observe`. Needs the
        device.
        """
        embeddings = [self._embeddings(picture, observe) for picture in prompt.pictures]
        spans = self.bridge.spans(prompt.pieces, prompt.pictures, embeddings, observe)
        return EncodedPrompt(spans, prompt.pictures, embeddings)

    def _embeddings(self, picture: Single, observe: Observer | None) -> Tensor:
        if picture.embeddings is not None:
            return picture.embeddings
        encoder, plan = self.bridge.encoder_of(picture), picture.plan
        embeddings = encoder.join(plan, encoder.encode(plan.tiles, observe, plan.normalize))
        self.bridge.cache.put(picture.key, picture.plan, embeddings)
        return embeddings


def _check_number(messages: Sequence[Message], context: int) -> None:
    """A message takes a token at least: to find out how many, thousands would be rendered."""
    if isinstance(messages, (list, tuple)) and len(messages) >= context:
        raise ContextError(
            f"messages: found {len(messages):,}, and the context holds {context:,} tokens; shorten "
            "the conversation",
            None,
            context,
        )
