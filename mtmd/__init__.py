"""Images and prompts in, answers out, with a receipt of what the model saw and where it ran.

    from mtmd import describe
    print(describe("cat.png", "What is this?"))

Importing this loads nothing heavy: torch comes with the first call. Import it before torch, if you
use both: torch's threads then wait for each other in a way that other processes do not spoil.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from mtmd.openmp import wait_shortly

if TYPE_CHECKING:  # what type checkers see of the table below; a test keeps the two alike
    from mtmd.base.errors import AudioError as AudioError
    from mtmd.base.errors import BusyError as BusyError
    from mtmd.base.errors import ContextError as ContextError
    from mtmd.base.errors import DeviceError as DeviceError
    from mtmd.base.errors import DeviceMemoryError as DeviceMemoryError
    from mtmd.base.errors import ImageError as ImageError
    from mtmd.base.errors import ModelError as ModelError
    from mtmd.base.errors import MtmdError as MtmdError
    from mtmd.base.errors import OptionError as OptionError
    from mtmd.base.errors import PlacementError as PlacementError
    from mtmd.base.errors import PromptError as PromptError
    from mtmd.base.errors import VideoError as VideoError
    from mtmd.chat import Chat as Chat
    from mtmd.clip.image.decode import Picture as Picture
    from mtmd.embedding.embedder import Embedder as Embedder
    from mtmd.embedding.embedder import load_embedder as load_embedder
    from mtmd.embedding.receipt import Ranking as Ranking
    from mtmd.embedding.reranker import Reranker as Reranker
    from mtmd.embedding.reranker import load_reranker as load_reranker
    from mtmd.events import Answer as Answer
    from mtmd.events import Box as Box
    from mtmd.events import Event as Event
    from mtmd.events import Finished as Finished
    from mtmd.events import Progress as Progress
    from mtmd.events import PromptTokenInfo as PromptTokenInfo
    from mtmd.events import TextPiece as TextPiece
    from mtmd.events import ThinkingPiece as ThinkingPiece
    from mtmd.events import TokenInfo as TokenInfo
    from mtmd.events import ToolCallPiece as ToolCallPiece
    from mtmd.inspect.fit import fit as fit
    from mtmd.inspect.predict_target import predict as predict
    from mtmd.kernels.report.warmup_report import WarmupReport as WarmupReport
    from mtmd.loading import describe as describe
    from mtmd.loading import load as load
    from mtmd.model import Model as Model
    from mtmd.options.keywords import AnswerKeywords as AnswerKeywords
    from mtmd.options.keywords import LoadKeywords as LoadKeywords
    from mtmd.prompt.audio_input import AudioInput as AudioInput
    from mtmd.prompt.conversation import Images as Images
    from mtmd.prompt.conversation import Message as Message
    from mtmd.prompt.conversation import RawPrompt as RawPrompt
    from mtmd.prompt.video_input import VideoInput as VideoInput
    from mtmd.receipt import AudioReceipt as AudioReceipt
    from mtmd.receipt import FrameReceipt as FrameReceipt
    from mtmd.receipt import ImageReceipt as ImageReceipt
    from mtmd.receipt import Receipt as Receipt
    from mtmd.receipt import VideoReceipt as VideoReceipt
    from mtmd.service.service import Service as Service
    from mtmd.service.stats import ServiceStats as ServiceStats
    from mtmd.service.stats import TokenCount as TokenCount
    from mtmd.service.ticket import Ticket as Ticket
    from mtmd.service.ticket import gather as gather
    from mtmd.tools.tool import Tool as Tool
    from mtmd.tools.tool import ToolCall as ToolCall
    from mtmd.transcription import Transcription as Transcription

__version__ = "0.2.0.dev0"

wait_shortly()

_LOCATIONS = {
    "mtmd.chat": ("Chat",),
    "mtmd.options.keywords": ("AnswerKeywords", "LoadKeywords"),
    "mtmd.events": (
        "Answer",
        "Box",
        "Event",
        "Finished",
        "Progress",
        "TextPiece",
        "ThinkingPiece",
        "PromptTokenInfo",
        "TokenInfo",
        "ToolCallPiece",
    ),
    "mtmd.tools.tool": ("Tool", "ToolCall"),
    "mtmd.transcription": ("Transcription",),
    "mtmd.embedding.embedder": ("Embedder", "load_embedder"),
    "mtmd.embedding.receipt": ("Ranking",),
    "mtmd.embedding.reranker": ("Reranker", "load_reranker"),
    "mtmd.loading": ("describe", "load"),
    "mtmd.model": ("Model",),
    "mtmd.service.service": ("Service",),
    "mtmd.service.stats": ("ServiceStats", "TokenCount"),
    "mtmd.prompt.conversation": ("Images", "Message", "RawPrompt"),
    "mtmd.service.ticket": ("Ticket", "gather"),
    "mtmd.inspect.fit": ("fit",),
    "mtmd.inspect.predict_target": ("predict",),
    "mtmd.prompt.audio_input": ("AudioInput",),
    "mtmd.receipt": ("AudioReceipt", "FrameReceipt", "ImageReceipt", "Receipt", "VideoReceipt"),
    "mtmd.clip.image.decode": ("Picture",),
    "mtmd.kernels.report.warmup_report": ("WarmupReport",),
    "mtmd.base.errors": (
        "AudioError",
        "BusyError",
        "ContextError",
        "DeviceError",
        "DeviceMemoryError",
        "ImageError",
        "ModelError",
        "MtmdError",
        "OptionError",
        "PlacementError",
        "PromptError",
        "VideoError",
    ),
    "mtmd.prompt.video_input": ("VideoInput",),
}
_LOCATION_OF = {name: module for module, names in _LOCATIONS.items() for name in names}

__all__ = sorted(_LOCATION_OF)


def __getattr__(name: str) -> Any:
    if name not in _LOCATION_OF:
        raise AttributeError(f"module 'mtmd' has no attribute {name!r}")
    return getattr(import_module(_LOCATION_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
