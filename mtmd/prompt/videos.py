"""Videos of a conversation: frames chosen as there is room for them, and read once. A family that
reads videos gets them so; another gets the frames as pictures, with their times.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np

from mtmd.base.cancellation import check_cancelled
from mtmd.base.errors import AudioError
from mtmd.base.text import plural
from mtmd.clip.audio.recording import AudioFile
from mtmd.clip.image.decode import Picture
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.token_budget import Budget
from mtmd.clip.video.choose import Evenly, chosen
from mtmd.clip.video.decode import Reader
from mtmd.clip.video.family import ClipShape
from mtmd.clip.video.footage import VideoFile
from mtmd.clip.video.frame_request import FrameRequest
from mtmd.clip.video.room_for_frames import fitting
from mtmd.clip.video.video import Part, Video, VideoFacts
from mtmd.loaded.loaded_model import LoadedModel
from mtmd.prompt.bridge import Bridge, Prepared, PreparedAudio, PreparedVideo, Shown
from mtmd.prompt.conversation import Conversation
from mtmd.prompt.known_videos import Known, KnownVideos
from mtmd.prompt.video_input import Requested
from mtmd.receipt import FrameReceipt, VideoReceipt

TILE_BYTES = 256 << 20  # that the frames of one video may take when they are ready to be encoded
LONGEST_TIME = 86400.0  # seconds; the time that is longest to write
OWN = "as the model's own processor takes videos"
WITH_SOUND = "with its sound"
NO_SOUND = "its sound is left out, as requested"
DEAF = "its sound is not used: the model sees videos without it"
Chosen: TypeAlias = "tuple[list[int], tuple[str, ...]]"
"""Numbers of frames, and notes on that choice."""


@dataclass(frozen=True, eq=False)
class ShownVideo:
    """A video as a part of a message; `media` in the order of the markers. `as_picture`: the same
    for a chat template that knows no videos.
    """

    part: dict[str, str]
    media: list[Shown]
    receipt: VideoReceipt
    sound: PreparedAudio | None = None

    @property
    def tokens(self) -> int:
        """Return the tokens of its frames, and of its sound."""
        return self.receipt.tokens + (self.sound.plan.tokens if self.sound else 0)

    def with_sound(self, bridge: Bridge, sound: PreparedAudio | None) -> ShownVideo:
        """The same with the sound that is heard with it, where there is some."""
        if sound is None:
            return self
        (video,) = self.media
        assert isinstance(video, PreparedVideo)
        return replace(self, media=[bridge.with_sound(video, sound)], sound=sound)

    @property
    def as_picture(self) -> ShownVideo:
        return self if self.part["type"] == "text" else replace(self, part={"type": "image"})


# In the place of a video, to see what the rest of a prompt takes.
NOT_SHOWN = ShownVideo(
    {"type": "text", "text": "\n"},
    [],
    VideoReceipt(0, 0, 0, "", (0, 0), (0, 0), (), 0, "", 0, False, "", ()),
)


class Videos:
    """Videos of one loaded model."""

    def __init__(self, loaded: LoadedModel, bridge: Bridge):
        self._loaded, self._bridge = loaded, bridge
        self._known = KnownVideos()

    @property
    def stored_bytes(self) -> int:
        """Bytes of the videos that were asked about, kept for repeated questions."""
        return self._known.stored_bytes

    def _sound(
        self, requested: Requested, facts: VideoFacts, part: Part, anew: bool, salt: str
    ) -> tuple[PreparedAudio | None, str]:
        """Return the sound of a video, where the model hears that, and a note on it."""
        footage, request = requested.footage, requested.request
        if not facts.has_sound or not isinstance(footage, VideoFile):
            return None, ""
        if request.no_sound:
            return None, NO_SOUND
        if not self._bridge.hears_videos:
            return None, DEAF
        is_whole = request.start is None and request.end is None
        span = (None, None) if is_whole else (part.begins, part.begins + part.seconds)
        name, isolate = f"sound of {footage.name}", footage.isolate
        try:
            recording = AudioFile(footage.file.source, name=name, isolate=isolate, span=span)
            return self._bridge.prepare_audio(recording, anew, salt, True), WITH_SOUND
        except AudioError as error:
            return None, f"its sound is left out: {error}"

    def show(
        self,
        videos: Sequence[Requested],
        room: int,
        detail: str,
        anew: bool,
        salt: str,
        counting: bool = False,
    ) -> list[ShownVideo]:
        """All in `room` tokens together, if need be in fewer frames; where they are only counted,
        what is known of them needs no pixels. Raises VideoError, OptionError
        for a request that a video cannot answer to, LeftError where nobody waits for it any more,
        and what `Bridge.prepare_media` raises.
        """
        shown = []
        for index, requested in enumerate(videos):
            part = room // (len(videos) - index)
            shown.append(self._show(requested, part, detail, anew, salt, counting))
            room -= shown[-1].tokens
        return shown

    def _show(
        self, requested: Requested, room: int, detail: str, anew: bool, salt: str, counting: bool
    ) -> ShownVideo:
        clock = time.perf_counter()
        way = _Own if self._bridge.video else _AsPictures
        making = way(self._loaded, self._bridge, detail, anew, salt)
        location = salt, requested.footage.sha256
        span = requested.request.start, requested.request.end
        met = self._known.met(location, span)
        if met is not None and not anew:
            facts, part = met
            sound, heard = self._sound(requested, facts, part, anew, salt)
            left = room - (sound.plan.tokens if sound else 0)
            indices, notes = making.choose(facts, part, requested, left)
            known = self._known.get((location, making.budget, tuple(indices)))
            again = known and self._again(known, counting)
            if known and again:
                ms = (time.perf_counter() - clock) * 1e3
                notes = (*notes, *filter(None, [heard]))
                made_again = making.shown(requested, known.facts, notes, again, ms, True)
                return made_again.with_sound(self._bridge, sound)
        with requested.footage.opened() as reader:
            facts, part = reader.facts, reader.part(*span)
            sound, heard = self._sound(requested, facts, part, anew, salt)
            left = room - (sound.plan.tokens if sound else 0)
            indices, notes = making.choose(facts, part, requested, left)
            frames = _Frames(reader, indices)
            try:
                made = making.made(frames)
            except _EndsEarlyError:
                frames = _Frames(reader, frames.indices)
                made = making.made(frames)
        key = location, making.budget, tuple(indices)
        if len(frames.times) < len(indices):
            early = f"ends at {frames.times[-1]:.1f} s, not at {facts.seconds:.1f} s as it says"
            notes = (*notes, f"{early}: {len(frames.times)} of {plural(len(indices), 'frame')}")
        seen = replace(facts, notes=(*facts.notes, *notes))
        known = Known(seen, tuple(frames.indices), tuple(frames.times), *made)
        self._known.put(location, span, (facts, part), key, known)
        ms = (time.perf_counter() - clock) * 1e3
        of_sound = tuple(filter(None, [heard]))
        shown = making.shown(requested, seen, of_sound, known, ms, False)
        return shown.with_sound(self._bridge, sound)

    def _again(self, known: Known, counting: bool) -> Known | None:
        """Return it with the embeddings of all its parts, or what they are made from; None where
        that is not kept of one of them.
        """
        result = []
        for prepared in known.prepared:
            entry = self._bridge.cache.get(prepared.key)
            reported = replace(prepared.receipt, cached=entry is not None)
            if entry is not None:
                result.append(
                    replace(prepared, plan=entry[0], embeddings=entry[1], receipt=reported)
                )
            elif prepared.plan.tiles or counting:
                result.append(replace(prepared, receipt=reported))
            else:
                return None
        return replace(known, prepared=tuple(result))


class _Frames:
    """Frames of a video that is being read: each is taken once, in order."""

    def __init__(self, reader: Reader, requested: Sequence[int]):
        self.facts, self.requested = reader.facts, requested
        self.indices: list[int] = []
        self.times: list[float] = []
        self._reader = reader

    def __iter__(self) -> Iterator[Pixels]:
        size = self.facts.width, self.facts.height
        for index, seconds, pixels in self._reader.take(self.requested, size):
            self.indices.append(index)
            self.times.append(seconds)
            yield pixels
            check_cancelled()
        if len(self.indices) < len(self.requested):
            raise _EndsEarlyError


class _EndsEarlyError(Exception):
    """There are fewer frames than the file says."""


class _AsPictures:
    """Videos as pictures, for a family without video of its own."""

    def __init__(self, loaded: LoadedModel, bridge: Bridge, detail: str, anew: bool, salt: str):
        assert bridge.encoder is not None
        self._context, self._bridge, self._anew, self._salt = (
            loaded.runner.context,
            bridge,
            anew,
            salt,
        )
        self._family = bridge.encoder.family
        # Of a video the model sees many pictures, each with less in it that is new.
        self.budget = replace(loaded.limits, detail="low" if detail == "auto" else detail)

    def choose(self, facts: VideoFacts, part: Part, requested: Requested, room: int) -> Chosen:
        maximum, why = self._maximum(facts, room, requested.footage.limits.max_frames)
        return chosen(Evenly(), facts, part, requested.request, maximum, why)

    def made(self, frames: _Frames) -> tuple[tuple[Prepared, ...], None]:
        prepared: list[Prepared] = []
        for pixels in frames:
            picture = Picture(pixels, (pixels.shape[1], pixels.shape[0]))
            prepared += self._bridge.prepare([picture], self.budget, self._anew, self._salt)
        return tuple(prepared), None

    def shown(
        self,
        requested: Requested,
        facts: VideoFacts,
        notes: tuple[str, ...],
        known: Known,
        ms: float,
        was_here: bool,
    ) -> ShownVideo:
        text = "".join(f"{_stated(t)}{self._family.marker}\n" for t in known.times)
        how = f"frames as pictures: {family_name(self._family)} has no video of its own"
        reported = _receipt(requested, facts, notes, known, 1, how, ms, was_here)
        return ShownVideo({"type": "text", "text": text}, list(known.prepared), reported)

    def _maximum(self, facts: VideoFacts, room: int, limit: int) -> tuple[int, str]:
        """Return how many frames there is room for, and why no more."""
        admission = self._bridge.admission
        blank = np.broadcast_to(np.zeros(3, np.uint8), (facts.height, facts.width, 3))
        prepare = admission.fit if admission else self._family.resolution.prepare
        plan = prepare(blank, self.budget)
        around = self._bridge.tokenizer.encode(_stated(LONGEST_TIME) + "\n")
        each = plan.tokens + len(around) + 4  # what stands around a picture, in some families
        tile_bytes = sum(tile.nbytes for tile in plan.tiles)
        fitting = _for_lack_of_room(room // each, self._context)
        return min(fitting, _for_memory(tile_bytes), _maximum(limit))


class _Own:
    """Videos for a family that reads videos."""

    def __init__(self, loaded: LoadedModel, bridge: Bridge, detail: str, anew: bool, salt: str):
        assert bridge.video is not None
        self._context, self._bridge, self._anew, self._salt = (
            loaded.runner.context,
            bridge,
            anew,
            salt,
        )
        self._family = bridge.video
        self.budget = replace(loaded.limits, detail=detail)

    def choose(self, facts: VideoFacts, part: Part, requested: Requested, room: int) -> Chosen:
        """Frames are made smaller before they are fewer. Fewer may each be larger, so that how many
        there is room for is tried.
        """
        maximum, why = _maximum(requested.footage.limits.max_frames)
        indices, notes = self._chosen(facts, part, requested.request, maximum, why)
        self.budget = self._smaller(facts, part, indices, room)
        while len(indices) > 1:
            shape = self._family.shape(facts.width, facts.height, len(indices), self.budget)
            tokens = shape.all_tokens + self._between(facts, part, indices, shape)
            frame_bytes = 3 * shape.size[0] * shape.size[1]
            memory, because = _for_memory(frame_bytes)
            if tokens > room:
                memory, because = _for_lack_of_room(
                    min(memory, len(indices) * room // tokens, len(indices) - 1), self._context
                )
            if memory >= len(indices):
                break
            indices, notes = self._chosen(facts, part, requested.request, memory, because)
        return indices, notes

    def _between(
        self, facts: VideoFacts, part: Part, indices: Sequence[int], shape: ClipShape
    ) -> int:
        """Tokens of the text before and between frames."""
        video = Video((), tuple(indices), part.times(indices), facts)
        text = self._family.prompt(video, shape).replace(self._family.token, "")
        return len(self._bridge.tokenizer.encode(self._bridge.number(0, video=True) + text))

    def _smaller(self, facts: VideoFacts, part: Part, indices: Sequence[int], room: int) -> Budget:
        """Return the shape of frames which are smaller, if need be, before they are fewer."""
        size, budget = (facts.width, facts.height), self.budget
        shape = self._family.shape(*size, len(indices), budget)
        between = self._between(facts, part, indices, shape)
        return fitting(self._family, size, len(indices), budget, room - between)

    def _chosen(
        self, facts: VideoFacts, part: Part, request: FrameRequest, maximum: int, why: str
    ) -> Chosen:
        return chosen(self._family.rule, facts, part, request, maximum, why)

    def made(self, frames: _Frames) -> tuple[tuple[Prepared, ...], PreparedVideo]:
        # Frames and their times come while the video is prepared, and are not held together.
        pixels, times = cast("Sequence[Pixels]", frames), cast("tuple[float, ...]", frames.times)
        video = Video(pixels, tuple(frames.requested), times, frames.facts)
        made = self._bridge.prepare_video(video, self.budget, self._anew, self._salt)
        made = replace(made, video=replace(made.video, times=tuple(frames.times)))
        return made.groups, made

    def shown(
        self,
        requested: Requested,
        facts: VideoFacts,
        notes: tuple[str, ...],
        known: Known,
        ms: float,
        was_here: bool,
    ) -> ShownVideo:
        assert known.video is not None
        video, each = replace(known.video, groups=known.prepared), known.video.shape.frames
        notes = (*notes, *video.shape.notes)
        reported = _receipt(requested, facts, notes, known, each, OWN, ms, was_here)
        return ShownVideo({"type": "video"}, [video], reported)


def _receipt(
    requested: Requested,
    facts: VideoFacts,
    notes: tuple[str, ...],
    known: Known,
    each: int,
    how: str,
    ms: float,
    was_here: bool,
) -> VideoReceipt:
    """`each`: frames of one of the prepared."""
    reported = [prepared.receipt for prepared in known.prepared]
    frames = tuple(
        FrameReceipt(
            index,
            seconds,
            reported[number // each].sha256,
            number % each,
            reported[number // each].tokens,
            reported[number // each].cached,
        )
        for number, (index, seconds) in enumerate(zip(known.indices, known.times, strict=True))
    )
    return VideoReceipt(
        seconds=facts.seconds,
        fps=facts.fps,
        frames_in_file=facts.frames,
        codec=facts.codec,
        original_size=(facts.width, facts.height),
        processed_size=reported[0].processed_size,
        frames=frames,
        tokens=sum(one.tokens for one in reported),
        sha256=requested.footage.sha256,
        read_ms=ms,
        read_before=was_here,
        how=how,
        notes=tuple(
            dict.fromkeys([*notes, *facts.notes, *(n for one in reported for n in one.notes)])
        ),
    )


def _for_lack_of_room(maximum: int, context: int) -> tuple[int, str]:
    return max(1, maximum), f"more do not fit the context of {context:,} tokens"


def _for_memory(frame_bytes: int) -> tuple[int, str]:
    return max(1, TILE_BYTES // frame_bytes), f"more take over {TILE_BYTES >> 20} MiB of memory"


def _maximum(limit: int) -> tuple[int, str]:
    return limit, f"{limit:,} frames are the most of one video"


def _stated(seconds: float) -> str:
    return f"Frame at {seconds:.1f} s: "


def family_name(family: object) -> str:
    """Return its name, as its file is called."""
    return type(family).__module__.removeprefix("mtmd.clip.families.").partition(".")[0]


def in_place_of_videos(
    conversation: Conversation,
    pictures: Sequence[Prepared],
    videos: Sequence[ShownVideo],
    audio: Sequence[PreparedAudio] = (),
) -> tuple[list[dict[str, Any]], list[Shown]]:
    """The messages with what stands for each video, and all that is shown in the order of the
    markers.
    """
    images, left, heard = iter(pictures), iter(videos), iter(audio)
    made: list[dict[str, Any]] = []
    shown: list[Shown] = []
    for message in conversation.messages:
        if isinstance(message["content"], str):
            made.append(message)
            continue
        parts: list[dict[str, Any]] = []
        for part in message["content"]:
            if part["type"] == "image":
                shown.append(next(images))
            elif part["type"] == "audio":
                shown.append(next(heard))
            elif part["type"] == "video":
                video = next(left)
                shown += video.media
                part = video.part
            if videos and part["type"] == "text" and parts and parts[-1]["type"] == "text":
                part = {"type": "text", "text": parts.pop()["text"] + part["text"]}
            parts.append(part)
        made.append({**message, "content": parts})
    return made, shown
