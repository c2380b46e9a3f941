"""Messages as people write them, made ready for the chat template: pictures loaded, text sealed,
shape checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias, cast

from mtmd.base.errors import ImageError, PromptError
from mtmd.clip.audio.recording import Recording
from mtmd.clip.image.decode import Picture
from mtmd.clip.video.footage import Footage
from mtmd.llm.tokenizer.control_tokens import SEAL
from mtmd.prompt.audio_input import AudioInput, AudioSource, as_input, is_pair, kind_of, load_audio
from mtmd.prompt.load_image import ImageSource, load_image
from mtmd.prompt.message_forms import filled, in_own_form
from mtmd.prompt.video_input import Requested, VideoInput, load_video, request_of
from mtmd.thinking.history import FIELD, NAMES
from mtmd.tools.history import sealed
from mtmd.tools.tool import DEEP_MAX, NAME, is_deep

Image: TypeAlias = "ImageSource | Picture | VideoInput | AudioInput"
Images: TypeAlias = "Image | Sequence[Image]"
AudioArgument: TypeAlias = "AudioSource | AudioInput | Sequence[AudioSource | AudioInput]"
Message: TypeAlias = Mapping[str, Any]
ParsedRequest: TypeAlias = "Images | Sequence[Message]"
EMPTY = "the prompt is empty; say what you want to know"
DEFAULT_PROMPT = "Describe the image."
AUDIO_PROMPT = "Describe the audio."
ID_CHARS_MAX = 256
CALLS_MAX = 256  # of one message
IMAGES_MAX = 1024
_SHOWN = ("image", "video", "audio")
_NOT_ALONGSIDE = (  # content alone
    *("image", "images", "image_url", "video", "videos", "video_url"),
    *("audio", "audios", "audio_url", "input_audio"),
)
CLOSER = ("low", "auto", "high")  # each is a closer look than those before it
SYSTEM_PICTURES = "pictures of the system message are shown in the first turn after it"


@dataclass(frozen=True)
class Conversation:
    """`messages` as the chat template takes them, an {"type": "image"} where each of the `pictures`
    belongs, a {"type": "video"} where each of the `videos` does and a {"type": "audio"} for each
    recording of `audio`, in order. `notes` say what had
    to be moved; `detail` is the closest look that a picture asks for, "auto" where none does.
    """

    messages: tuple[dict[str, Any], ...]
    pictures: tuple[Picture, ...]
    notes: tuple[str, ...] = ()
    videos: tuple[Requested, ...] = ()
    detail: str = "auto"
    audio: tuple[Recording, ...] = ()


class OwnWords(str):
    """A text that is the model's own and not a user's: spellings of special tokens in it become
    those tokens. No text from outside has this type.
    """


@dataclass(frozen=True)
class RawPrompt:
    """A prompt without a chat template: text, in which the spellings of special tokens are those
    tokens, or the tokens' ids.
    """

    text: str | tuple[int, ...]


def user_message(image: Images, prompt: str) -> Message:
    """One user turn: the images, and videos among them, then the prompt. Raises ImageError for an
    empty list: a turn of text alone needs no such message.
    """
    images = pictures_of(image)
    if not images:
        raise ImageError(
            "images: found an empty list, expected at least one; give a path, bytes, a Pillow "
            "image or an array"
        )
    if isinstance(prompt, str) and not prompt.replace(SEAL, "").strip():
        raise PromptError(EMPTY)
    return {
        "role": "user",
        "content": [*(_shown(source) for source in images), {"type": "text", "text": prompt}],
    }


def pictures_of(image: Any) -> Sequence[Any]:
    """The images of a question: one, those of a list, or what an iterator gives. Raises ImageError
    for one of more than any context holds.
    """
    if isinstance(image, (list, tuple)):
        return image
    if not isinstance(image, Iterator) or hasattr(image, "read"):  # an open file is one, too
        return [image]
    images = list(islice(image, IMAGES_MAX + 1))
    if len(images) > IMAGES_MAX:
        raise ImageError(
            f"images: found an iterator of more than {IMAGES_MAX:,}, expected the pictures of one "
            "question; `answers` takes any number, one after another"
        )
    return images


def _shown(source: Any) -> dict[str, Any]:
    kind = kind_of(source)
    return {"type": kind, kind: source}


def audio_of(audio: AudioArgument) -> list[AudioInput]:
    """The audio of a question: one, or those of a list."""
    listed: Sequence[Any] = audio if isinstance(audio, (list, tuple)) else [audio]
    if is_pair(audio):
        listed = [audio]
    return [as_input(source) for source in listed]


def messages_of(
    images: Images | None,
    prompt: str | None,
    system: str | None = None,
    audio: AudioArgument | None = None,
    task: str | None = None,
) -> list[Message]:
    """One question as a conversation: what the model is told before it, pictures, audio, text;
    without a `prompt` a description is asked for, with a `task` nothing, as that brings its own.
    Raises PromptError where there is neither picture nor text, and what `user_message` does.
    """
    reported = with_system((), system)
    if isinstance(prompt, str) and not prompt.replace(SEAL, "").strip():
        raise PromptError(EMPTY)
    shown = [] if images is None else list(pictures_of(images))
    if audio is not None:
        shown += audio_of(audio)
    if images is not None or shown:
        is_heard = bool(shown) and all(kind_of(one) == "audio" for one in shown)
        default = AUDIO_PROMPT if is_heard else DEFAULT_PROMPT
        message = user_message(shown, default if prompt is None else prompt)
        if prompt is None and task is not None:
            message = {**message, "content": message["content"][:-1]}
        return [*reported, message]
    if prompt is None:
        raise PromptError("found neither picture nor prompt, expected at least one of them")
    return [*reported, {"role": "user", "content": prompt}]


def requested(
    image: ParsedRequest | None,
    prompt: str | None,
    messages: Sequence[Message] | None = None,
    system: str | None = None,
    audio: AudioArgument | None = None,
    task: str | None = None,
) -> list[Message]:
    """The conversation that a call asks for, by a question (`image`, `audio`, `prompt`) or by
    `messages`, which may stand in the place of `image`, too; pictures and audio beside them are for
    the places that they have for such. Raises PromptError where there is neither, or a prompt
    beside messages, and what `messages_of`, `filled` and `with_system` do.
    """
    if messages is None and is_conversation(image):
        image, messages = None, cast(Sequence[Message], image)
    if messages is None:
        return messages_of(cast("Images | None", image), prompt, system, audio, task)
    check_list(messages)
    if prompt is not None:
        raise PromptError(
            "prompt: found with messages, expected one of them; put it into the last message"
        )
    messages = in_own_form(messages)
    if image is not None or audio is not None:
        shown = [] if image is None else list(pictures_of(image))
        messages = filled(messages, [*shown, *([] if audio is None else audio_of(audio))])
    return with_system(messages, system)


def is_conversation(value: object) -> bool:
    """Return whether it is messages, and no pictures: those are no mappings."""
    return isinstance(value, Sequence) and len(value) > 0 and isinstance(value[0], Mapping)


def with_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The conversation, with `system` before it. Raises PromptError where it has a beginning of
    that kind already, and for what is no text.
    """
    if system is None or system == "":
        return list(messages)
    if not isinstance(system, str):
        raise PromptError(f"system: found {type(system).__name__}, expected a text")
    if messages and isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
        raise PromptError(
            "system: found with a message of role 'system', expected one of them; leave one out"
        )
    return [{"role": "system", "content": system}, *messages]


def with_own_system(messages: Sequence[Message], system: str) -> Sequence[Message]:
    """The conversation, with the model's own `system` before it unless it has one."""
    begins = messages[0] if isinstance(messages, Sequence) and messages else None
    if not system or not isinstance(begins, Mapping):
        return messages  # what is no conversation is refused by who reads it
    if begins.get("role") in ("system", "developer"):
        return messages
    return [{"role": "system", "content": system}, *messages]


def read_conversation(
    messages: Sequence[Message],
    seal: Callable[[str], str],
    load: Callable[..., Picture] = load_image,
    load_footage: Callable[..., Footage] = load_video,
    load_recording: Callable[..., Recording] = load_audio,
) -> Conversation:
    """Load the pictures with `load`, open the videos with `load_footage` and audio with
    `load_recording`, and put `seal` to all text: what a user writes must not become a special
    token.

    messages: {"role": ..., "content": text, or a list of {"type": "text", "text": ...}, {"type":
    "image", "image": source}, {"type": "audio", "audio": source} and {"type": "video", "video":
    source}, with fps, max_frames, start and end beside the source where they are asked for}. A
    message of the assistant may have "tool_calls" as OpenAI's interface has them, and then no
    content; one of role "tool" has the result of the call "tool_call_id"; one of the assistant may
    have the thought before it as "reasoning_content", "reasoning" or "thinking". Raises PromptError
    for anything else and for a conversation in which nothing is said or shown, ImageError for a
    picture, VideoError for a video, AudioError for audio.
    """
    check_list(messages)
    media = _Media()
    detail = max(_details(messages), key=CLOSER.index, default="auto")
    messages, notes = _without_system_pictures(messages)
    plain = tuple(_message(m, i, seal, media) for i, m in enumerate(messages, 1))
    if not any(_says_something(m["content"]) or m.get("tool_calls") for m in plain):
        raise PromptError(EMPTY)
    footage = _open(media.videos, load_footage)
    recordings = _load_audio(media.audio, load_recording)
    return Conversation(plain, _load(media.images, load), notes, footage, detail, recordings)


@dataclass
class _Media:
    """Sources of the media of a conversation, in order."""

    images: list[ImageSource | Picture] = field(default_factory=list)
    videos: list[Mapping[str, Any]] = field(default_factory=list)
    audio: list[Any] = field(default_factory=list)


def check_list(messages: object) -> None:
    """Raises PromptError for what is no conversation by its outer form."""
    if (
        isinstance(messages, (str, bytes, Mapping))
        or not isinstance(messages, Sequence)
        or not messages
    ):
        empty = "an empty " if isinstance(messages, Sequence) and not messages else ""
        raise PromptError(
            f"messages: found {empty}{type(messages).__name__}, expected a list of at least one "
            f"{{'role': ..., 'content': ...}}"
        )


def check_message(message: object, number: int) -> None:
    """Raises PromptError for what has no role."""
    if isinstance(message, Mapping) and isinstance(message.get("role"), str):
        return
    several = "; each conversation is a call of its own" if isinstance(message, list) else ""
    value = "no text as 'role'" if isinstance(message, Mapping) else type(message).__name__
    raise PromptError(
        f"message {number}: found {value}, expected a mapping with 'role' and 'content'{several}"
    )


def _details(messages: Sequence[Any]) -> Iterator[str]:
    """Yield what stands beside pictures, as in OpenAI's interface."""
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else ():
            if not isinstance(part, Mapping) or part.get("type") != "image":
                continue
            detail = part.get("detail")
            if detail is not None and detail not in CLOSER:
                raise PromptError(
                    f"message {number}: found the detail {detail!r:.60}, expected one of "
                    f"{', '.join(CLOSER)}"
                )
            yield "auto" if detail is None else detail


def _open(
    videos: Sequence[Mapping[str, Any]], load: Callable[..., Footage]
) -> tuple[Requested, ...]:
    """Do what `_load` does."""
    result = []
    for i, part in enumerate(videos, 1):
        source = part["video"]
        name = f"video {i}" if len(videos) > 1 else "video"
        requested = source.request if isinstance(source, VideoInput) else request_of(part)
        result.append(Requested(load(source, unnamed=name), requested))
    return tuple(result)


def _load_audio(sources: Sequence[Any], load: Callable[..., Recording]) -> tuple[Recording, ...]:
    """Do what `_load` does."""
    several = len(sources) > 1
    return tuple(
        load(source, unnamed=f"audio {i}" if several else "audio")
        for i, source in enumerate(sources, 1)
    )


def _without_system_pictures(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Chat templates show no pictures of system messages: they go to the first turn after."""
    made: list[Message] = []
    pictures: list[Any] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (list, tuple)):
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else []
        else:
            parts = list(content)
        if isinstance(message, Mapping) and message.get("role") in ("system", "developer"):
            shown = [p for p in parts if isinstance(p, Mapping) and p.get("type") in _SHOWN]
            if shown:
                pictures += shown
                message = {**message, "content": [p for p in parts if p not in shown]}
        elif pictures and isinstance(message, Mapping) and message.get("role") == "user":
            message = {**message, "content": [*pictures, *parts]}
            pictures = []
        made.append(message)
    if pictures:
        made.append({"role": "user", "content": pictures})
    moved = len(made) != len(messages) or any(
        a is not b for a, b in zip(made, messages, strict=False)
    )
    return made, (SYSTEM_PICTURES,) if moved else ()


def _load(
    images: Sequence[ImageSource | Picture], load: Callable[..., Picture]
) -> tuple[Picture, ...]:
    """The pictures in order; of several, those without a name are called by their place."""
    several = len(images) > 1
    return tuple(
        image
        if isinstance(image, Picture)
        else load(image, unnamed=f"image {i}" if several else "image")
        for i, image in enumerate(images, 1)
    )


def _message(
    message: Any, number: int, seal: Callable[[str], str], media: _Media
) -> dict[str, Any]:
    where = f"message {number}"
    check_message(message, number)
    role, content = str(message["role"]), message.get("content")
    # Templates write roles into the prompt beside control tokens, so a role must not spell one.
    if not re.fullmatch(r"[A-Za-z_]{1,32}", role):
        raise PromptError(
            f"messages[{number - 1}] has role {role!r:.60}; expected a word such as 'user', "
            "'assistant' or 'system'"
        )
    for name in _NOT_ALONGSIDE:
        if message.get(name) is not None:
            raise PromptError(
                f"{where}: found {name!r} beside the content, expected it as a part of that, "
                '{"type": "image", "image": source}, or pictures as a list of \'images\''
            )
    more = _calls(message, where, seal) | _answered(message, where) | _thought(message, where, seal)
    if content is None and (role == "assistant" or "tool_call_id" in more):
        content = ""
    role = "tool" if "tool_call_id" in more else role
    if isinstance(content, str):
        return {"role": role, "content": seal(content), **more}
    if not isinstance(content, (list, tuple)):
        raise PromptError(
            f"{where}: content is {type(content).__name__}, expected a text or a list of parts"
        )
    return {"role": role, "content": [_part(p, where, seal, media) for p in content], **more}


def _calls(message: Message, where: str, seal: Callable[[str], str]) -> dict[str, Any]:
    """The tool calls of a message, their arguments as values, sealed."""
    calls = message.get("tool_calls")
    if calls is None and isinstance(message.get("function_call"), Mapping):
        calls = [{"id": "", "function": message["function_call"]}]  # OpenAI's older interface
    if message["role"] != "assistant" or not calls:
        return {}
    if not isinstance(calls, (list, tuple)) or len(calls) > CALLS_MAX:
        raise PromptError(f"{where}: expected as tool_calls a list of at most {CALLS_MAX}")
    return {
        "tool_calls": [_call(call, f"{where}, call {n}", seal) for n, call in enumerate(calls, 1)]
    }


def _thought(message: Message, where: str, seal: Callable[[str], str]) -> dict[str, str]:
    """The thought before an answer, by any of the names that interfaces have for it."""
    if message["role"] != "assistant":
        return {}
    name = next((name for name in NAMES if message.get(name) is not None), None)
    thought = None if name is None else message[name]
    if thought is None or thought == "":
        return {}
    if not isinstance(thought, str):
        raise PromptError(f"{where}: {name} is {type(thought).__name__}, expected a text")
    return {FIELD: seal(thought)}


def _call(call: Any, where: str, seal: Callable[[str], str]) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise PromptError(f"{where}: expected an object with 'id' and 'function'")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PromptError(f"{where}: found the name {name!r:.60}, expected a function's")
    arguments = {} if arguments is None else _read_arguments(arguments)
    if not isinstance(arguments, (str, Mapping)):
        raise PromptError(
            f"{where}: the arguments are of type {type(arguments).__name__}, expected a JSON "
            "object, or the text that the model wrote"
        )
    if is_deep(arguments):
        raise PromptError(f"{where}: expected arguments of at most {DEEP_MAX} levels")
    values = sealed(arguments, seal)
    return {
        "id": _id(call.get("id"), where),
        "type": "function",
        "function": {"name": name, "arguments": values},
    }


def _read_arguments(arguments: Any) -> Any:
    """Return the arguments of a call as an object; a text that is none, as of a call that was cut,
    stays the text that the model wrote.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, Mapping) else arguments


def _answered(message: Message, where: str) -> dict[str, Any]:
    """Return what a result answers."""
    if message["role"] not in ("tool", "function"):
        return {}
    name, id_ = message.get("name"), _id(message.get("tool_call_id"), where)
    if name is not None and (not isinstance(name, str) or not NAME.fullmatch(name)):
        raise PromptError(f"{where}: found the name {name!r:.60}, expected a function's")
    return {"tool_call_id": id_, **({} if name is None else {"name": name})}


def _id(value: object, where: str) -> str:
    """Chat templates write ids, so they must not spell anything else."""
    if value is None:
        return ""
    fits = isinstance(value, str) and len(value) <= ID_CHARS_MAX
    if not isinstance(value, str) or not fits or not re.fullmatch(r"[A-Za-z0-9_.:/-]*", value):
        raise PromptError(
            f"{where}: found the id {value!r:.60}, expected letters, digits and any of _ - . : /"
        )
    return value


def _part(part: Any, where: str, seal: Callable[[str], str], media: _Media) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and "text" in part:
        if not isinstance(part["text"], str):
            raise PromptError(
                f"{where}: the text is of type {type(part['text']).__name__}, expected a str; "
                "write what you want to know"
            )
        text = part["text"]
        return {"type": "text", "text": str(text) if isinstance(text, OwnWords) else seal(text)}
    if kind == "image" and "image" in part:
        media.images.append(part["image"])
        return {"type": "image"}
    if kind == "video" and "video" in part:
        media.videos.append(part)
        return {"type": "video"}
    if kind == "audio" and "audio" in part:
        media.audio.append(part["audio"])
        return {"type": "audio"}
    if isinstance(kind, str) and kind in ("text", *_SHOWN):
        value = "TEXT" if kind == "text" else "SOURCE"
        raise PromptError(
            f"{where}: a part of type {kind!r} has no {kind!r}; write "
            f'{{"type": "{kind}", "{kind}": {value}}}'
            + (", or give what belongs there beside the messages" if kind != "text" else "")
        )
    actual = (
        f"a part of type {kind!r:.60}" if kind is not None else f"{type(part).__name__} as a part"
    )
    raise PromptError(
        f"{where}: found {actual}, expected one of type 'text', 'image', 'video' or 'audio'"
    )


def _says_something(content: str | list[dict[str, str]]) -> bool:
    if isinstance(content, str):
        return bool(content.strip())
    return any(p["type"] in _SHOWN or p.get("text", "").strip() for p in content)
