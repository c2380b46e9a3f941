"""Formats that need a library which not everybody has: HEIC pictures (pillow-heif) and the pages of
PDFs (pypdfium2), both of the extra `formats`; and AVIF, where Pillow was built with it.
"""

from __future__ import annotations

import io
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
from PIL import ImageFile, features

from mtmd.base.errors import ImageError
from mtmd.base.extras import install_command
from mtmd.clip.image.pixels import Pixels

PAGE_SIDE = 2048
"""Pixels of the longer side of a page: A4 at 175 dots per inch, which small print needs."""
LARGEST_SCALE = 300 / 72
"""Of pixels to points, for pages that are small."""
LIBRARIES = {"HEIF": "pillow_heif", "PDF": "pypdfium2"}
_PDFIUM = threading.Lock()  # which is not safe to use from several threads


def missing(kind: str) -> str | None:
    """Return what is to be done before a format can be read, None where nothing is."""
    if kind == "AVIF" and not features.check("avif"):
        return "this Pillow was built without AVIF; install Pillow's own wheel"
    library = LIBRARIES.get(kind)
    if library is None or find_spec(library) is not None:
        return None
    return f"{library.replace('_', '-')} reads it: {install_command('formats')}"


def load_libraries() -> None:
    """Load the libraries that are installed, so that no worker has to."""
    for library in LIBRARIES.values():
        if find_spec(library) is not None:
            import_module(library)


def open_avif(file: io.BytesIO) -> ImageFile.ImageFile:
    plugin: Any = import_module("PIL.AvifImagePlugin")
    plugin.DEFAULT_MAX_THREADS = 1  # a worker has room for no more
    return cast(ImageFile.ImageFile, plugin.AvifImageFile(file))


def open_heif(file: io.BytesIO) -> ImageFile.ImageFile:
    """Turned upright by libheif, as the file says."""
    options: Any = import_module("pillow_heif.options")
    options.THUMBNAILS, options.DEPTH_IMAGES, options.AUX_IMAGES = False, False, False
    options.DECODE_THREADS = 1
    return cast(ImageFile.ImageFile, import_module("pillow_heif.as_plugin").HeifImageFile(file))


def pdf_page(data: bytes, page: int, name: str) -> tuple[Pixels, int]:
    """Page `page`, from 0 on, as pixels on white, and how many there are. Raises ImageError."""
    pdfium: Any = import_module("pypdfium2")
    with _PDFIUM:
        try:
            document = pdfium.PdfDocument(data)
        except pdfium.PdfiumError as error:
            if "password" in str(error).lower():
                raise ImageError(
                    f"{name}: found a PDF with a password, expected one without; save it without"
                ) from error
            raise
        try:
            count = len(document)
            if not 0 <= page < count:
                raise ImageError(
                    f"{name}: found a PDF of {count:,} pages, expected one with a page {page + 1:,}"
                )
            sheet = document[page]
            scale = min(PAGE_SIDE / max(*sheet.get_size(), 1.0), LARGEST_SCALE)
            drawn = sheet.render(scale=scale, rev_byteorder=True, prefer_bgrx=False)
            pixels = np.array(drawn.to_numpy()[:, :, :3])
            drawn.close()
            sheet.close()
        finally:
            document.close()
    return pixels[:PAGE_SIDE, :PAGE_SIDE], count
