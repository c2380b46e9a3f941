"""Describes whatever a user calls an image, read within limits: paths, bytes, open files, Pillow
images, arrays.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeGuard, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mtmd.base.errors import ImageError, MtmdError
from mtmd.base.isolation.limits import available as can_isolate
from mtmd.base.text import shortened
from mtmd.clip.image.decode import (
    DEFAULT_LIMITS,
    ImageLimits,
    Picture,
    Source,
    check_bytes,
    one_line,
    open_picture,
    picture_size,
)
from mtmd.clip.image.isolated import open_isolated
from mtmd.clip.image.pixels import Pixels
from mtmd.clip.image.signatures import picture_format
from mtmd.prompt.data_url import URL_BYTES_MAX, data_url, read_data_url
from mtmd.prompt.fetch_url import RemoteMedia
from mtmd.prompt.picture_paths import check_path, not_opened, not_readable, user_path
from mtmd.prompt.url_kinds import is_address, is_data_url, is_url, url_identity, url_name

__all__ = [
    "DEFAULT_LIMITS",
    "ImageLimits",
    "ImageSource",
    "Picture",
    "decoded_bytes",
    "jpeg_bytes",
    "load_image",
    "load_isolated",
    "picture_format",
    "picture_size",
    "picture_url",
    "png_bytes",
]

if TYPE_CHECKING:
    from torch import Tensor

ImageSource: TypeAlias = "str | os.PathLike[str] | Source | BinaryIO | Tensor"

_CHUNK_BYTES = 1 << 20
CHANNELS = (1, 3, 4)


def load_image(
    source: ImageSource,
    limits: ImageLimits = DEFAULT_LIMITS,
    unnamed: str = "image",
    page: int = 0,
    remote: RemoteMedia | None = None,
) -> Picture:
    """One picture from a path, a data URL, the bytes of a file, a file open for reading bytes, a
    Pillow image, an array [H, W(, 1|3|4)] or a tensor [(1|3|4,) H, W], of uint8 or of floats from 0
    to 1; a tensor's channels may stand last, too; with `remote` from an http(s) address, too. It is
    decoded in this process: right for one's own.

    An open file is read from where it stands, from its beginning where that is its end, and left
    open. `unnamed`: what messages call a
    picture without a path or name. `page` of a PDF, from 0 on. Raises ImageError.
    """
    data, name = _read(source, limits, unnamed, remote)
    return open_picture(data, limits, name, page)


def load_isolated(
    source: ImageSource,
    limits: ImageLimits = DEFAULT_LIMITS,
    unnamed: str = "image",
    page: int = 0,
    remote: RemoteMedia | None = None,
) -> Picture:
    """Do what `load_image` does, with files decoded in a worker process, where a hostile one takes
    nothing else along; in this one where the system cannot limit processes. `page` of a PDF, from 0
    on. Raises BusyError, too.
    """
    data, name = _read(source, limits, unnamed, remote)
    if isinstance(data, (Image.Image, np.ndarray)) or not can_isolate():
        return open_picture(data, limits, name, page)
    return open_isolated(bytes(data), limits, name, page)


def _read(
    source: ImageSource, limits: ImageLimits, unnamed: str, remote: RemoteMedia | None
) -> tuple[Source, str]:
    """Return what `open_picture` takes, and its name."""
    if isinstance(source, str) and is_data_url(source):
        return read_data_url(source, min(limits.max_bytes, URL_BYTES_MAX), unnamed), unnamed
    if isinstance(source, str) and is_address(source) and remote is not None:
        return remote(source, min(limits.max_bytes, URL_BYTES_MAX)), url_name(source)
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        name = shortened(one_line(str(path))) if path else unnamed
        return _read_path(path, limits, name), name
    if hasattr(source, "read") and not isinstance(source, (bytes, bytearray, memoryview)):
        own_name = getattr(source, "name", None)
        name = shortened(one_line(own_name)) if isinstance(own_name, str) and own_name else unnamed
        file = cast(BinaryIO, source)
        return _read_file(file, limits, name) or _read_file(_rewound(file), limits, name), name
    if _is_tensor(source):
        return _array_of(source, unnamed), unnamed
    if not isinstance(source, (bytes, bytearray, memoryview, Image.Image, np.ndarray)):
        actual = type(source).__name__  # callers need not be type-checked
        expected = "a path, bytes, an open file, a Pillow image, an array or a tensor"
        raise ImageError(
            f"{unnamed}: found an object of type {actual}, expected {expected}; {_advice(source)}"
        )
    return source, unnamed


def _advice(source: object) -> str:
    """Return what to do about an object that is none of a picture."""
    if isinstance(source, Mapping):  # a row of a data set
        return "give the picture in it, such as x['image']"
    is_nan = isinstance(source, float) and source != source
    if source is None or is_nan or type(source).__name__ in ("NAType", "NaTType"):
        return "tables have this where a value is missing: leave such rows out, as dropna() does"
    if isinstance(source, (list, tuple)):
        return "give one list of pictures"
    if hasattr(source, "tolist") and getattr(source, "ndim", None) == 1:
        return "give the pictures in it as a list, list(x)"  # a column of a table
    if hasattr(source, "__array__") or hasattr(source, "__array_interface__"):
        return "make it an array, numpy.asarray(x)"  # of JAX, TensorFlow or MLX
    return "open or convert it first"


def decoded_bytes(source: object) -> int | None:
    """Return the decoded bytes of a picture's pixels, or several's, as headers and shapes tell
    before anything is decoded; None where they do not. Raises nothing: what is wrong with it is
    told when it is read.
    """
    if source is None:
        return 0
    if isinstance(source, (list, tuple)):
        each = [decoded_bytes(one) for one in source]
        return None if None in each else sum(one for one in each if one is not None)
    if isinstance(source, Picture):
        return 0  # it is there
    if isinstance(source, Image.Image):
        return 3 * source.width * source.height
    if isinstance(source, np.ndarray):
        return 3 * int(np.prod(source.shape[:2]))
    with suppress(MtmdError, OSError, ValueError):
        if isinstance(source, (str, os.PathLike)) and not is_url(source):
            path = user_path(os.fsdecode(source))
            check_path(path)  # nothing that is no file is opened
            with Path(path).open("rb") as file:
                source = file.read(_CHUNK_BYTES)
        if isinstance(source, (bytes, bytearray, memoryview)):
            width, height = picture_size(bytes(source[:_CHUNK_BYTES]))
            return 3 * width * height
    return None


def _is_tensor(source: object) -> TypeGuard[Tensor]:
    torch = sys.modules.get("torch")  # who has a tensor has imported it
    return torch is not None and isinstance(source, torch.Tensor)


def _array_of(tensor: Tensor, name: str) -> NDArray[Any]:
    """[H, W] or [H, W, C]: a tensor has its channels first, as torchvision's do, unless only its
    last dimension can be them.
    """
    shape = list(tensor.shape)
    if tensor.is_meta:
        raise ImageError(f"{name}: found a tensor on the device meta, expected one that has values")
    if tensor.ndim == 4:
        raise ImageError(
            f"{name}: found a tensor of shape {shape}, expected one picture [C, H, W] or [H, W]; "
            "give those of a batch as a list, list(tensor)"
        )
    if tensor.ndim == 3 and shape[0] in CHANNELS:
        tensor = tensor.permute(1, 2, 0)
    elif tensor.ndim != 2 and not (tensor.ndim == 3 and shape[2] in CHANNELS):
        raise ImageError(
            f"{name}: found a tensor of shape {shape}, expected one picture [C, H, W] or [H, W], "
            "of 1, 3 or 4 channels"
        )
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        return tensor.float().numpy()
    if str(tensor.dtype) != "torch.uint8":
        raise ImageError(
            f"{name}: found a tensor of {tensor.dtype} and shape {shape}, expected uint8, or "
            "floats from 0 to 1; where its values are 0 to 255 make it x.to(torch.uint8)"
        )
    return tensor.numpy()


def read_picture(path: str | os.PathLike[str], limits: ImageLimits = DEFAULT_LIMITS) -> bytes:
    """The bytes of a picture file, not looked into yet. Raises ImageError."""
    return _read_path(os.fspath(path), limits, shortened(one_line(os.fspath(path))))


def read_url(url: str, limits: ImageLimits = DEFAULT_LIMITS, *, kind: str = "image") -> bytes:
    """Return what a data URL holds, or what lies at a public address of the web, a picture or,
    by `kind`, a video or audio, not looked into yet. Raises ImageError.
    """
    maximum = min(limits.max_bytes, URL_BYTES_MAX)
    if is_data_url(url):
        return read_data_url(url, maximum, url_identity(url))
    return RemoteMedia()(url, maximum, kind)


def _rewound(file: BinaryIO) -> BinaryIO:
    """One that stands at its end, as after a picture was written into it, at its beginning."""
    with suppress(AttributeError, OSError, ValueError):
        file.seek(0)
    return file


def _read_path(path: str | bytes, limits: ImageLimits, name: str) -> bytes:
    """The bytes of a regular file. Type and size are looked up first, so that no pipe is waited for
    and no huge file is read.
    """
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    path = user_path(path)
    try:
        check_bytes(check_path(path, name).st_size, limits, name)
        with Path(path).open("rb") as file:
            return _read_file(file, limits, name)
    except FileNotFoundError:  # gone since it was looked at
        raise ImageError(
            f"{name}: found no such file, expected a picture; check the path"
        ) from None
    except PermissionError:
        raise not_readable(name) from None
    except (OSError, ValueError) as error:
        raise not_opened(name, error) from error


def _read_file(file: BinaryIO, limits: ImageLimits, name: str) -> bytes:
    """All that is left in an open file; stops one byte past the limit, which the check that follows
    then refuses.
    """
    chunks: list[Any] = []
    room = limits.max_bytes + 1
    try:
        while room > 0 and (chunk := file.read(min(room, _CHUNK_BYTES))):
            if not isinstance(chunk, (bytes, bytearray, memoryview)):
                raise ImageError(
                    f"{name}: found a file open for text, expected bytes; open it with mode 'rb'"
                )
            chunks.append(chunk)
            room -= len(chunk)
    except (OSError, ValueError) as error:
        raise ImageError(
            f"{name}: found a file that cannot be read, expected one open for reading; open it "
            "anew with 'rb'"
        ) from error
    return b"".join(chunks)


def jpeg_bytes(pixels: Pixels, longest: int | None = None) -> bytes:
    """A JPEG file of uint8 `[H, W, 3]`, scaled down to `longest` pixels where it is larger."""
    image = Image.fromarray(pixels)
    if longest:
        image.thumbnail((longest, longest))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, subsampling=0)
    return file.getvalue()


def picture_url(data: bytes) -> str:
    """A picture's file as a data URL; a file that is no picture is refused when it is opened."""
    kind = picture_format(data) or "octet-stream"
    return data_url(data, f"{'application' if kind == 'PDF' else 'image'}/{kind.lower()}")


def png_bytes(pixels: Pixels) -> bytes:
    """uint8 [Y, X, 3] as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def preview(pixels: Pixels, edge: int) -> bytes:
    """uint8 [Y, X, 3] as a JPEG file, its longer side `edge` pixels at most."""
    image = Image.fromarray(pixels)
    image.thumbnail((edge, edge))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return file.getvalue()
