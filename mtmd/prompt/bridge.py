"""The batching bridge: pictures, videos, audio and a rendered prompt become spans that the decoder
reads.

Pictures are prepared, encoded several at once (`mtmd.service.encode_queue`), and put
where the chat template left their marker. Those encoded before are in the bridge's `cache`. A video
is groups of frames, each of which is prepared, encoded and kept as a picture is; so is audio, whose
tiles are windows of it.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import count, groupby
from threading import Lock
from typing import TypeAlias

import numpy as np
from torch import Tensor

from mtmd.base.errors import PromptError
from mtmd.base.turns import turn_released
from mtmd.clip.audio.audio import AudioFacts
from mtmd.clip.audio.recording import Recording
from mtmd.clip.audio_family import HearsAlongsidePictures
from mtmd.clip.encoder import AudioEncoder, Encoder
from mtmd.clip.family import (
    BarePrompt,
    ContextFamily,
    Numbered,
    OnCanvases,
    PicturesFirst,
    PrefixFamily,
    RewritesPrompt,
    ScalesBoxes,
)
from mtmd.clip.image.decode import Picture
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.instructed import Instructed, Instruction
from mtmd.clip.resolution.resolution import AmongSeveral, ImagePlan, closed
from mtmd.clip.token_budget import DEFAULT_BUDGET, Budget
from mtmd.clip.video.family import ClipShape, ThinsFrames, VideoFamily
from mtmd.clip.video.sound import Piece as SoundPiece
from mtmd.clip.video.video import Video
from mtmd.kernels.plan.executor import Observer
from mtmd.llm.engine.spans import Span
from mtmd.llm.tokenizer.control_tokens import SEAL
from mtmd.llm.tokenizer.tokenizer import Tokenizer
from mtmd.loaded.fitting.needed_memory import CACHE_BYTES
from mtmd.loaded.memory_admission import Admission
from mtmd.prompt.embedding_cache import EmbeddingCache, Key
from mtmd.prompt.pieces import Part, Piece, on_canvases, pieces_of, with_shared_marks
from mtmd.receipt import AudioReceipt, ImageReceipt


@dataclass(frozen=True, eq=False)
class Encodable:
    """Tiles ready to be encoded, and the key they are cached by."""

    key: Key
    plan: ImagePlan

    @property
    def content(self) -> bytes:
        """Return what its embeddings show, in a few bytes."""
        return sha256(repr(self.key).encode()).digest()[:16]


@dataclass(frozen=True, eq=False)
class PreparedAudio(Encodable):
    """Audio ready to be encoded, or, with `embeddings` [T, D], encoded before."""

    receipt: AudioReceipt
    embeddings: Tensor | None = None

    @property
    def stored(self) -> int:
        """Bytes of its tiles."""
        return sum(tile.nbytes for tile in self.plan.tiles)


@dataclass(frozen=True, eq=False)
class Prepared(Encodable):
    """A picture ready to be encoded, or, with `embeddings` [T, D], encoded before."""

    receipt: ImageReceipt
    embeddings: Tensor | None = None

    @property
    def stored(self) -> int:
        """Bytes of its tiles, and of the picture that they are of."""
        width, height = self.receipt.original_size
        return 3 * width * height + sum(tile.nbytes for tile in self.plan.tiles)


@dataclass(frozen=True, eq=False)
class PreparedVideo:
    """A video ready to be encoded: its groups of frames in order, and the text that stands for it.
    `times` as `VideoFamily.times` gives them. `video` has its frames no more. `sound` is heard with
    the frames, in `order`.
    """

    video: Video
    shape: ClipShape
    groups: tuple[Prepared, ...]
    text: str
    times: tuple[float, ...] | None = None
    sound: PreparedAudio | None = None
    order: tuple[SoundPiece, ...] = ()

    @property
    def cached_groups(self) -> int:
        """Return how many of them were encoded before."""
        return sum(group.receipt.cached for group in self.groups)


WORDS = {Prepared: "picture", PreparedVideo: "video", PreparedAudio: "audio"}
Medium: TypeAlias = "Picture | Video"
Single: TypeAlias = "Prepared | PreparedAudio"
"""What is encoded at once, and stands for one run of tokens."""
Shown: TypeAlias = "Single | PreparedVideo"
FACTS = 256  # of audio that was decoded before, whose embeddings may be cached


class Bridge:
    """Bridge from pictures and prompts to spans. Without an `admission`, pictures take the memory
    they take. `image_width`: numbers of a row that the decoder reads, of pictures and of audio.
    `instruction_tokenizer`: that of an encoder that reads the text of a prompt.
    """

    def __init__(
        self,
        encoder: Encoder | None,
        tokenizer: Tokenizer,
        admission: Admission | None = None,
        audio_encoder: AudioEncoder | None = None,
        image_width: int = 0,
        instruction_tokenizer: Tokenizer | None = None,
    ):
        self._instruction_tokenizer = instruction_tokenizer
        self.encoder, self.tokenizer, self.admission = encoder, tokenizer, admission
        self.audio_encoder, self.image_width = audio_encoder, image_width
        self._heard: OrderedDict[Key, AudioFacts] = OrderedDict()
        self._noting = Lock()
        # Admission plans a run to say how much: it is not asked before there is something to keep.
        self.cache = EmbeddingCache(
            lambda: admission.embedding_cache_bytes if admission else CACHE_BYTES
        )

    @property
    def video(self) -> VideoFamily | None:
        """Return how the model reads videos; None where it does not, or its tokenizer cannot say
        so.
        """
        video = None if self.encoder is None else self.encoder.family.video
        return video if video is not None and self.tokenizer.knows(video.token) else None

    def encoder_of(self, prepared: Single) -> Encoder | AudioEncoder:
        """Return what encodes it."""
        encoder = self.audio_encoder if isinstance(prepared, PreparedAudio) else self.encoder
        assert encoder is not None
        return encoder

    def prepare_audio(
        self,
        recording: Recording,
        anew: bool = False,
        salt: str = "",
        alongside_pictures: bool = False,
    ) -> PreparedAudio:
        """A recording decoded, resampled and cut into windows, as one in a prompt with pictures
        where it is `alongside_pictures`; one in the cache of the same `salt` needs no more work,
        unless it is to be done `anew`. Raises AudioError, BusyError, and DeviceMemoryError where a
        window takes more memory than can be free.
        """
        encoder, clock = self.audio_encoder, time.perf_counter()
        assert encoder is not None
        family = encoder.family
        way, kind = family.resolution, "audio"
        if alongside_pictures and isinstance(family, HearsAlongsidePictures):
            way, kind = family.alongside_pictures, "audio beside pictures"
        key = f"{kind} {recording.sha256}", DEFAULT_BUDGET, salt
        entry = None if anew else self.cache.get(key)
        with self._noting:
            facts = self._heard.get(key)
        if entry is None or facts is None:
            audio = recording.audio(family.rate)
            with turn_released():
                plan, embeddings = way.windows(audio.samples), None
            if self.admission:
                self.admission.check_audio(plan)
            facts = audio.facts
            with self._noting:
                self._heard[key] = facts
                while len(self._heard) > FACTS:
                    self._heard.popitem(last=False)
        else:
            plan, embeddings = entry
        receipt = AudioReceipt(
            facts.seconds,
            facts.rate,
            facts.channels,
            facts.codec,
            plan.tokens,
            recording.sha256,
            embeddings is not None,
            (time.perf_counter() - clock) * 1e3,
            (*facts.notes, *plan.notes),
        )
        return PreparedAudio(key, plan, receipt, embeddings)

    def prepare_media(
        self,
        media: Sequence[Medium],
        budget: Budget = DEFAULT_BUDGET,
        anew: bool = False,
        salt: str = "",
    ) -> list[Shown]:
        """Pictures and videos, in order. Raises what `prepare` and `prepare_video` do."""
        pictures = iter(
            self.prepare([m for m in media if not isinstance(m, Video)], budget, anew, salt)
        )
        return [
            self.prepare_video(m, budget, anew, salt) if isinstance(m, Video) else next(pictures)
            for m in media
        ]

    def prepare_video(
        self, video: Video, budget: Budget = DEFAULT_BUDGET, anew: bool = False, salt: str = ""
    ) -> PreparedVideo:
        """A video for a model that reads them (`video`): its frames are asked for once and in
        order, and no more than a group of them is held in the size in which they came. Groups in
        the cache of the same `salt` need no more work, unless all is to be done `anew`.

        Raises ImageError for frames of a shape that the family does not take, OptionError for a
        budget that cannot be kept, DeviceMemoryError for groups that take more memory than can be
        free.
        """
        family = self.video
        assert family is not None
        width, height = video.facts.width, video.facts.height
        shape = family.shape(width, height, len(video.indices), budget)
        groups: list[Prepared] = []
        scaled: list[Pixels] = []
        before = None
        left = len(video.indices)
        for frame in video.frames:
            with turn_released():
                scaled.append(family.scale(frame, shape))
            left -= 1
            if len(scaled) == shape.frames or not left:
                closing = 0 if left else shape.closing
                groups.append(
                    self._group(family, scaled, before, shape, closing, video, budget, anew, salt)
                )
                before = scaled[-1] if isinstance(family, ThinsFrames) else None
                scaled = []
        assert len(groups) == shape.groups, "as many frames as there are indices"
        return PreparedVideo(
            replace(video, frames=()),
            shape,
            tuple(groups),
            family.prompt_of(video, [one.plan for one in groups])
            if isinstance(family, ThinsFrames)
            else family.prompt(video, shape),
            family.times(video, shape),
        )

    @property
    def hears_videos(self) -> bool:
        """Return whether the model hears the sound of videos with their frames."""
        video = self.video
        return self.audio_encoder is not None and video is not None and video.sound is not None

    def with_sound(self, video: PreparedVideo, sound: PreparedAudio) -> PreparedVideo:
        """A video with its sound, for a model that hears both (`hears_videos`)."""
        family, encoder = self.video, self.audio_encoder
        assert family is not None and family.sound is not None and encoder is not None
        order = tuple(family.sound(video.times or (), sound.plan.tokens))
        token = encoder.family.token
        before, _, after = encoder.family.marker.partition(token)
        runs = (
            family.token * video.groups[one].plan.tokens
            if isinstance(one, int)
            else token * (one[1] - one[0])
            for one in order
        )
        text = "".join((before, *runs, after))
        return replace(video, text=text, sound=sound, order=order)

    def _group(
        self,
        family: VideoFamily,
        frames: Sequence[Pixels],
        before: Pixels | None,
        shape: ClipShape,
        closing: int,
        video: Video,
        budget: Budget,
        anew: bool,
        salt: str,
    ) -> Prepared:
        """Known by the pixels that the tower would see, whatever file they are from; `closing`
        tokens follow. The frame `before` counts where tokens are left out.
        """
        known = *shape.size, shape.frames, len(frames), *(closing,) * bool(closing)
        seen = sha256(repr(known).encode())
        for frame in frames if before is None else (*frames, before):
            seen.update(np.ascontiguousarray(frame).data)
        key = seen.hexdigest(), budget, salt
        entry = None if anew else self.cache.get(key)
        if entry is None:
            with turn_released():
                plan = (
                    family.thinned(frames, before, shape)
                    if isinstance(family, ThinsFrames)
                    else family.group(frames, shape)
                )
                plan, embeddings = closed(plan, closing), None
            if self.admission:
                self.admission.check_frames(plan)
        else:
            plan, embeddings = entry
        size = video.facts.width, video.facts.height
        receipt = ImageReceipt(
            size, shape.size, 1, plan.tokens, key[0], entry is not None, plan.notes
        )
        return Prepared(key, plan, receipt, embeddings)

    def prepare(
        self,
        pictures: Sequence[Picture],
        budget: Budget = DEFAULT_BUDGET,
        anew: bool = False,
        salt: str = "",
    ) -> list[Prepared]:
        """Pictures cut and normalised, each different one once; those in the cache, of the same
        `salt`, need no more work, unless all is to be done `anew`.

        Raises OptionError for a budget that cannot be kept, ImageError for a shape that the family
        does not take, DeviceMemoryError for one that takes more memory than can be free, however
        small it is shown.
        """
        assert self.encoder is not None
        resolution, preprocessing = self.encoder.family.resolution, self.encoder.preprocessing
        prepare = self.admission.fit if self.admission else resolution.prepare
        if len(pictures) > 1 and isinstance(resolution, AmongSeveral):
            budget = replace(budget, several=True)
        made: dict[Key, tuple[ImagePlan, Tensor | None]] = {}
        result, family = [], self.encoder.family
        scale = family.box_scale if isinstance(family, ScalesBoxes) else ""
        for picture in pictures:
            key = picture.sha256, budget, salt
            cached = key in made
            if not cached:
                entry = None if anew else self.cache.get(key)
                cached = entry is not None
                if entry is not None:
                    made[key] = entry
                else:
                    with turn_released():  # mostly in numpy, beside the interpreter
                        plan = preprocessing.prepare(partial(prepare, picture.pixels, budget))
                        made[key] = plan, None
            plan, embeddings = made[key]
            receipt = ImageReceipt(
                picture.size,
                plan.sizes[0],
                len(plan.sizes),
                plan.tokens,
                picture.sha256,
                cached,
                (*picture.notes, *plan.notes),
                scale,
            )
            result.append(Prepared(key, plan, receipt, embeddings))
        return result

    def read(self, rendered: str, shown: Sequence[Shown]) -> list[Piece]:
        """The rendered prompt with pictures, videos and audio at their markers, tokenized; the
        pieces count pictures, groups of frames and audio alike, as `flat` has them. Raises
        PromptError where the template wrote more or fewer markers.
        """
        markers = self._markers
        if not markers:
            return [Piece(tuple(self.tokenizer.encode_prompt(rendered)))]
        parts = re.split(f"({'|'.join(map(re.escape, markers))})", rendered)
        texts, result = parts[::2], [markers[marker] for marker in parts[1::2]]
        kinds = [type(one) for one in shown]
        for kind, what in WORDS.items():
            requested, locations = kinds.count(kind), result.count(kind)
            if locations != requested:
                raise PromptError(
                    f"the chat template wrote {locations} {what} places for {requested} "
                    f"{what if kind is PreparedAudio else f'{what}s'}; it does not fit this model"
                )
        if kinds != result:
            raise PromptError(
                "the chat template writes pictures, videos and audio in another order than the "
                "message has them; put all pictures before the videos, or ask about them one by one"
            )
        family: object = self.encoder.family if self.encoder else None
        text = texts[0] + "".join(map("".join, zip(self._texts(shown), texts[1:], strict=True)))
        if isinstance(family, ContextFamily) and len(shown) > family.pictures:
            raise PromptError(
                f"the prompt has {len(shown)} pictures, and this model sees at most "
                f"{family.pictures} at once; leave some out"
            )
        if isinstance(family, RewritesPrompt):
            text = family.rewritten(text)
        read: tuple[int, ...] = ()
        if shown and isinstance(family, Instructed):
            text, read = self._instruction(text, family.instruction)
        tokens = {self.tokenizer.id(token) for token in self.tokens}
        pieces = pieces_of(self._encoded(text), tokens, _parts(shown))
        pieces = [p if p.is_text else replace(p, instruction=read) for p in pieces]
        first = 0
        for one in shown:
            count = len(flat([one]))
            if isinstance(one, PreparedVideo) and one.sound and self._shares_marks:
                pieces = with_shared_marks(pieces, range(first, first + count))
            first += count
        if isinstance(family, OnCanvases):
            canvases = [family.canvas(one.plan) for one in flat(shown)]
            given = {i: canvas for i, canvas in enumerate(canvases) if canvas is not None}
            if given:
                return on_canvases(pieces, given, self.tokenizer.encode("\n")[-1])
        return pieces

    def _encoded(self, text: str) -> list[int]:
        """Tokens of a prompt's text, with what the tokenizer puts around it."""
        family: object = self.encoder.family if self.encoder else None
        if isinstance(family, BarePrompt):
            return self.tokenizer.encode(text)
        if not isinstance(family, PicturesFirst):
            return self.tokenizer.encode_prompt(text)
        assert self.encoder is not None
        pictures, token, rest = text.rpartition(self.encoder.family.image_token)
        return [*self.tokenizer.encode(pictures + token), *self.tokenizer.encode_prompt(rest)]

    def _instruction(self, text: str, how: Instruction) -> tuple[str, tuple[int, ...]]:
        """Return what the decoder reads of a prompt, and the text behind the pictures in the tokens
        of the encoder, of a long one the end: its authors cut it so. Raises PromptError for one
        that is too long where the decoder does not read it.
        """
        assert self.encoder is not None
        tokenizer = self._instruction_tokenizer or self.tokenizer
        pictures, token, words = text.rpartition(self.encoder.family.image_token)
        before, after = tokenizer.prefix, tokenizer.suffix
        ids = tokenizer.encode(_sealed(words.replace(SEAL, ""), tokenizer, how.written))
        room = how.tokens - len(before) - len(after)
        if how.in_place is not None and len(ids) > room:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, expected at most {room}, which this model's "
                "encoder reads with a picture; shorten it"
            )
        read = *before, *ids[max(len(ids) - room, 0) :], *after
        return text if how.in_place is None else pictures + token + how.in_place, read

    @property
    def _shares_marks(self) -> bool:
        sound = None if self.video is None else self.video.sound
        return sound is not None and sound.shares

    @property
    def _markers(self) -> dict[str, type]:
        """Return what templates write for each kind; one that holds another stands before it."""
        result: dict[str, type] = {}
        if self.video:
            result |= dict.fromkeys(self.video.markers, PreparedVideo)
        if self.encoder is not None:
            result[self.encoder.family.marker] = Prepared
        if self.audio_encoder is not None:
            result[self.audio_encoder.family.marker] = PreparedAudio
        return result

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens whose place embeddings take."""
        image = () if self.encoder is None else (self.encoder.family.image_token,)
        video = () if self.video is None else (self.video.token,)
        audio = () if self.audio_encoder is None else (self.audio_encoder.family.token,)
        return (*image, *video, *audio)

    def number(self, index: int, video: bool = False) -> str:
        """The text before a picture's own, or a video's, that says which of them it is, from 0;
        "" for families that do not count them.
        """
        family = self.encoder.family if self.encoder else None
        return family.numbered(index, video) if isinstance(family, Numbered) else ""

    def _texts(self, shown: Sequence[Shown]) -> Iterator[str]:
        """The texts that stand for pictures, videos and audio, in order."""
        pictures, videos = count(), count()
        for one in shown:
            if isinstance(one, PreparedVideo):
                yield self.number(next(videos), video=True) + one.text
            elif isinstance(one, Prepared):
                yield self.number(next(pictures)) + self.encoder_of(one).family.prompt(one.plan)
            else:
                yield self.encoder_of(one).family.prompt(one.plan)

    def spans(
        self,
        pieces: Sequence[Piece],
        prepared: Sequence[Single],
        embeddings: Sequence[Tensor],
        observe: Observer | None = None,
    ) -> list[Span]:
        """Pieces with the embeddings [T, D] of pictures and audio, in order. Of an encoder that
        reads the text of a prompt they are made here, of features [S, C], every node shown to
        `observe`.
        """
        spans = []
        for piece in pieces:
            if piece.picture is None:
                made = self._marked(piece.tokens) if prepared else [Span(piece.tokens)]
                first = replace(
                    made[0], repeats=piece.repeats, on_canvas=piece.on_canvas, later=piece.later
                )
                spans += [first, *made[1:]]
                continue
            shown = prepared[piece.picture]
            encoder = self.encoder_of(shown)
            attended: object = encoder.family
            rows, content = embeddings[piece.picture], shown.content
            if piece.instruction:
                rows, content = self._instructed(shown, rows, piece.instruction, observe)
            if isinstance(attended, ContextFamily):
                real = len(rows) if piece.instruction else attended.real_rows(shown.plan)
                spans.append(Span(piece.tokens, rows, content=content, real=real))
                continue
            rows = rows[piece.start : piece.start + len(piece.tokens)]
            if isinstance(encoder, AudioEncoder):
                rows = encoder.widened(rows, self.image_width)
            spans.append(
                Span(
                    piece.tokens,
                    rows,
                    isinstance(encoder, Encoder) and encoder.family.bidirectional,
                    piece.grid,
                    piece.later,
                    number=piece.number,
                    content=content,
                    offset=piece.start,
                    on_canvas=piece.on_canvas,
                )
            )
        family: object = self.encoder.family if self.encoder else None
        if isinstance(family, PrefixFamily):
            last = max((i for i, s in enumerate(spans) if not s.is_text), default=-1)
            stop = len(spans) if family.whole_prompt else last + 1
            block = [replace(s, block=True, joins=i > 0) for i, s in enumerate(spans[:stop])]
            return [*block, *spans[stop:]]
        return spans

    def _instructed(
        self,
        shown: Single,
        features: Tensor,
        instruction: tuple[int, ...],
        observe: Observer | None,
    ) -> tuple[Tensor, bytes]:
        """Embeddings of a picture for one text, from the cache where they are there, and what they
        show in a few bytes.
        """
        assert self.encoder is not None and self.encoder.reader is not None
        content = sha256(shown.content + repr(instruction).encode()).digest()[:16]
        key = f"instructed {content.hex()}", *shown.key[1:]
        entry = None if observe else self.cache.get(key)
        if entry is None:
            rows = self.encoder.reader.rows(features, instruction, observe)
            self.cache.put(key, shown.plan, rows)
        else:
            rows = entry[1]
        return rows, content

    def _marked(self, tokens: Sequence[int]) -> list[Span]:
        """Text beside pictures or audio, some of whose tokens may have embeddings of the families'
        own.
        """
        marks: dict[int, Tensor] = {}
        for encoder in (self.encoder, self.audio_encoder):
            for token, row in (encoder.marks() if encoder else {}).items():
                marks[self.tokenizer.id(token) if isinstance(token, str) else token] = row
        if not marks:
            return [Span(tuple(tokens))]
        spans: list[Span] = []
        for is_mark, run in groupby(tokens, marks.__contains__):
            ids = tuple(run)
            if is_mark:
                spans += [Span((i,), marks[i][None], content=b"mark %d" % i) for i in ids]
            else:
                spans.append(Span(ids))
        return spans


def _sealed(text: str, tokenizer: Tokenizer, written: re.Pattern[str] | None) -> str:
    """A user's text without special tokens, but for those that may be written."""
    if written is None:
        return tokenizer.seal(text)
    parts = written.split(text)
    return "".join(part if i % 2 else tokenizer.seal(part) for i, part in enumerate(parts))


def flat(shown: Sequence[Shown]) -> list[Single]:
    """Return what is to be encoded: pictures, the groups of videos, the sound of each behind them,
    and audio, in order.
    """
    result: list[Single] = []
    for one in shown:
        if isinstance(one, PreparedVideo):
            result += [*one.groups, *([one.sound] if one.sound else [])]
        else:
            result.append(one)
    return result


def _parts(shown: Sequence[Shown]) -> list[Part]:
    """Return what runs of tokens show, in the order of the prompt, with how much later each is than
    the first of its clip; counted as `flat` does.
    """
    parts: list[Part] = []
    first = 0
    for one in shown:
        if not isinstance(one, PreparedVideo):
            parts.append(Part(first, one.plan))
            first += 1
            continue
        times = one.times and [int(time) for time in one.times]
        for each in one.order or range(len(one.groups)):
            if isinstance(each, int):
                later = times[each] if times and each else None
                parts.append(Part(first + each, one.groups[each].plan, later))
            else:
                assert one.sound is not None
                number = first + len(one.groups)
                parts.append(Part(number, one.sound.plan, each[0], *each))
        first += len(one.groups) + (one.sound is not None)
    return parts
