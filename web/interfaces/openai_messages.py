"""Messages as OpenAI's chat has them: their texts, pictures, videos, audio, files and calls."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BeforeValidator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError, to_json

from mtmd import ToolCall
from mtmd.web.answering.request import Piece
from mtmd.web.answering.tools import called_function
from mtmd.web.errors import TAG
from mtmd.web.intake.long_texts import CutText, PictureText, as_data_url, beginning
from mtmd.web.intake.media import Reference
from mtmd.web.intake.typed_body import Loose
from mtmd.web.interfaces.fields import (
    MAX_CALLS,
    FrameCount,
    FramesPerSecond,
    Seconds,
    Several,
    Text,
    by_type,
    given,
    none_for_minus_one,
    of_file_data,
    text_or,
)


def _as_url(value: Any) -> Any:
    return {"url": value} if isinstance(value, str) else value


def _as_data(value: Any) -> Any:
    return {"data": value} if isinstance(value, str) else value


Frames: TypeAlias = Annotated[
    FrameCount | None,
    BeforeValidator(none_for_minus_one),
    WithJsonSchema({"type": "integer", "minimum": -1, "maximum": 1 << 20}),
]


def _detail(value: Any) -> Any:
    if value is None or value == "":
        return "auto"
    return "high" if value == "original" else value


Detail: TypeAlias = Annotated[
    Literal["auto", "low", "high"],
    # as clients write that they ask for nothing, or for the picture as it is
    BeforeValidator(_detail),
    WithJsonSchema({"enum": ["auto", "low", "high", "original", "", None]}),
]


class ImageURL(Loose):
    url: PictureText
    detail: Detail = "auto"


class FrameChoice(Loose):
    """Describes which frames of a video are seen, and whether its sound is heard; `num_frames` is
    vLLM's word for `max_frames`.
    """

    fps: Annotated[FramesPerSecond | None, BeforeValidator(none_for_minus_one)] = None
    max_frames: Frames = None
    num_frames: Frames = None
    start: Seconds | None = None
    end: Seconds | None = None
    no_sound: bool | None = None

    def chosen(self) -> dict[str, Any]:
        frames = self.max_frames or self.num_frames
        span = {"start": self.start, "end": self.end}
        return given(fps=self.fps, max_frames=frames, no_sound=self.no_sound, **span)


class VideoURL(FrameChoice):
    url: PictureText


class InputVideo(FrameChoice):
    """llama.cpp's: `data` in base64, or a URL."""

    data: PictureText | None = None
    url: PictureText | None = None
    format: str | None = Field(default=None, max_length=32)

    @model_validator(mode="after")
    def _one(self) -> InputVideo:
        if (self.data is None) == (self.url is None):
            raise PydanticCustomError("video", "expected one of data and url")
        return self

    @property
    def reference(self) -> str | CutText:
        if self.data is None:
            return self.url or ""
        is_url = beginning(self.data).startswith("data:")
        return self.data if is_url else as_data_url(self.data, "video/mp4")


class AudioURL(Loose):
    """vLLM's."""

    url: PictureText


class InputAudio(Loose):
    """`data` in base64, or, as llama.cpp has it, a URL. The first bytes say what it is, whatever
    `format` does.
    """

    data: PictureText | None = None
    url: PictureText | None = None
    format: str | None = Field(default=None, max_length=32)

    @model_validator(mode="after")
    def _one(self) -> InputAudio:
        if (self.data is None) == (self.url is None):
            raise PydanticCustomError("audio", "expected one of data and url")
        return self

    @property
    def reference(self) -> str | CutText:
        if self.data is None:
            return self.url or ""
        is_url = beginning(self.data).startswith("data:")
        return self.data if is_url else as_data_url(self.data, "audio/wav")


class FileReference(FrameChoice):
    """A picture, video or audio, uploaded before or in `file_data`: a data URL, or base64 alone.
    The choice of frames is for a video.
    """

    file_id: str | None = None
    file_data: PictureText | None = None

    @model_validator(mode="after")
    def _one(self) -> FileReference:
        if (self.file_id is None) == (self.file_data is None):
            value = "neither file_data nor" if self.file_id is None else "both file_data and"
            raise PydanticCustomError(
                "file",
                "found {found} file_id, expected one of them; file_data is the file, as "
                "data:image/png;base64,..., file_id what /v1/files has given it",
                {"found": value},
            )
        return self

    @property
    def reference(self) -> str | CutText:
        return self.file_id or "" if self.file_data is None else of_file_data(self.file_data)


class TextPart(Loose):
    type: Literal["text"]
    text: str

    def piece(self, _: str) -> Piece:
        return self.text


class ImagePart(Loose):
    type: Literal["image_url"]
    image_url: ImageURL

    def piece(self, location: str) -> Piece:
        return Reference(f"{location}.image_url", self.image_url.url)


class VideoPart(Loose):
    type: Literal["video_url"]
    video_url: Annotated[VideoURL, BeforeValidator(_as_url)]

    def piece(self, location: str) -> Piece:
        video = self.video_url
        return Reference(f"{location}.video_url", video.url, "video", video.chosen())


class InputVideoPart(Loose):
    type: Literal["input_video"]
    input_video: Annotated[InputVideo, BeforeValidator(_as_data)]

    def piece(self, location: str) -> Piece:
        video = self.input_video
        return Reference(f"{location}.input_video", video.reference, "video", video.chosen())


class AudioPart(Loose):
    type: Literal["audio_url"]
    audio_url: Annotated[AudioURL, BeforeValidator(_as_url)]

    def piece(self, location: str) -> Piece:
        return Reference(f"{location}.audio_url", self.audio_url.url, "audio")


class InputAudioPart(Loose):
    type: Literal["input_audio"]
    input_audio: Annotated[InputAudio, BeforeValidator(_as_data)]

    def piece(self, location: str) -> Piece:
        return Reference(f"{location}.input_audio", self.input_audio.reference, "audio")


class FilePart(Loose):
    """A picture, video or audio as a file."""

    type: Literal["file"]
    file: FileReference

    def piece(self, location: str) -> Piece:
        return Reference(f"{location}.file", self.file.reference, None, self.file.chosen())


Part: TypeAlias = Annotated[
    Annotated[TextPart, Tag(f"{TAG}text")]
    | Annotated[ImagePart, Tag(f"{TAG}image_url")]
    | Annotated[VideoPart, Tag(f"{TAG}video_url")]
    | Annotated[InputVideoPart, Tag(f"{TAG}input_video")]
    | Annotated[AudioPart, Tag(f"{TAG}audio_url")]
    | Annotated[InputAudioPart, Tag(f"{TAG}input_audio")]
    | Annotated[FilePart, Tag(f"{TAG}file")],
    by_type(
        "part",
        "the type of a part has to be text, image_url, video_url, input_video, audio_url, "
        "input_audio or file",
    ),
]


Content: TypeAlias = Annotated[
    Text | Annotated[Several[Part], Field(min_length=1)], text_or("parts")
]


class CalledFunction(Loose):
    name: str = Field(max_length=128)
    arguments: str | dict[str, Any] | None = None

    @property
    def text(self) -> str:
        """The arguments as JSON text."""
        arguments = self.arguments
        return to_json(arguments).decode() if isinstance(arguments, dict) else arguments or ""


class MessageCall(Loose):
    """A call that the assistant made."""

    id: str | None = Field(default=None, max_length=256)
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _of_a_text(cls, value: Any) -> Any:
        return called_function(value)


class Message(Loose):
    """`reasoning_content`: what the assistant thought before, also as `reasoning` or `thinking`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = Field(default=None, validate_default=True)
    name: str | None = Field(default=None, max_length=256)
    tool_calls: list[MessageCall] | None = Field(default=None, max_length=MAX_CALLS)
    function_call: CalledFunction | None = None
    tool_call_id: str | None = Field(default=None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None  # where Ollama's messages have them: never left aside

    @property
    def thought(self) -> str | None:
        return self.reasoning_content or self.reasoning or self.thinking

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        calls = self.tool_calls or []
        if self.function_call is not None and not calls:
            calls = [MessageCall(function=self.function_call)]
        return tuple(ToolCall(c.id or "", c.function.name, c.function.text) for c in calls)

    @field_validator("images")
    @classmethod
    def _has_no_images(cls, value: list[Any] | None) -> list[Any] | None:
        if value:
            raise PydanticCustomError(
                "images",
                "images are parts of the content here, such as "
                '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
            )
        return value

    @field_validator("content")
    @classmethod
    def _has_content(cls, value: Any, info: ValidationInfo) -> Any:
        """Only an assistant may say nothing, and a tool."""
        if value is None and info.data.get("role") in ("system", "developer", "user"):
            raise PydanticCustomError("content", "expected a text or a list of parts")
        return value


class MediaOptions(Loose):
    """vLLM's, for all videos of a request."""

    video: FrameChoice | None = None
