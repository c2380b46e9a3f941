"""Images and prompts in, answers out, with a receipt of what the model saw and where it ran.

    from mtmd import describe
    print(describe("cat.png", "What is this?"))

Importing this loads nothing heavy: torch comes with the first call.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mtmd.clip.image.decode import Picture
    from mtmd.events import Answer, Event, Finished, Progress, TextPiece
    from mtmd.inspect.predict import predict
    from mtmd.kernels.errors import (
        BusyError,
        DeviceMemoryError,
        ImageError,
        ModelError,
        MtmdError,
        OptionError,
        PlacementError,
        PromptError,
    )
    from mtmd.kernels.report.facts import WarmupReport
    from mtmd.loading import describe, load
    from mtmd.model import Model
    from mtmd.receipt import ImageReceipt, Receipt
    from mtmd.service.service import Service, ServiceStats, Ticket, TokenCount

__version__ = "0.1.0"

_PLACES = {
    "mtmd.events": ("Answer", "Event", "Finished", "Progress", "TextPiece", "TokenInfo"),
    "mtmd.loading": ("describe", "load"),
    "mtmd.model": ("Model",),
    "mtmd.service.service": ("Service",),
    "mtmd.service.stats": ("ServiceStats", "TokenCount"),
    "mtmd.service.ticket": ("Ticket",),
    "mtmd.inspect.predict": ("predict",),
    "mtmd.receipt": ("ImageReceipt", "Receipt"),
    "mtmd.clip.image.decode": ("Picture",),
    "mtmd.kernels.report.facts": ("WarmupReport",),
    "mtmd.kernels.errors": (
        "BusyError",
        "DeviceMemoryError",
        "ImageError",
        "ModelError",
        "MtmdError",
        "OptionError",
        "PlacementError",
        "PromptError",
    ),
}
_PLACE_OF = {name: module for module, names in _PLACES.items() for name in names}

__all__ = [
    "Answer",
    "BusyError",
    "DeviceMemoryError",
    "Event",
    "Finished",
    "ImageError",
    "ImageReceipt",
    "Model",
    "ModelError",
    "MtmdError",
    "OptionError",
    "Picture",
    "PlacementError",
    "Progress",
    "PromptError",
    "Receipt",
    "Service",
    "ServiceStats",
    "TextPiece",
    "Ticket",
    "TokenCount",
    "TokenInfo",
    "WarmupReport",
    "describe",
    "load",
    "predict",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACE_OF:
        raise AttributeError(f"module 'mtmd' has no attribute {name!r}")
    return getattr(import_module(_PLACE_OF[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
