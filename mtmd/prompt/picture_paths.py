"""Paths of pictures looked at before anything is read or imported for them. Loads without numpy."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote_to_bytes

from mtmd.base.errors import ImageError
from mtmd.base.spelling import nearest_path
from mtmd.base.text import printable, shortened
from mtmd.prompt.url_kinds import is_address, is_data_url, url_name

# Of files that are taken for pictures where none is named: in folders, and dropped on a terminal.
# One that is named may have any.
IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".png", ".webp", ".avif", ".heic", ".heif"),
    *(".gif", ".bmp", ".tif", ".tiff", ".pdf"),
)
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".webm", ".mkv", ".avi")
AUDIO_SUFFIXES = (".wav", ".mp3", ".flac", ".ogg", ".oga", ".opus", ".m4a", ".m4b", ".aac")
BASE64_CHARS = 200  # fewer may be a name
_BASE64 = re.compile(r"[A-Za-z0-9+/_-]+={0,2}")
_KINDS = (
    (stat.S_ISDIR, "a folder", "give the picture files in it"),
    (stat.S_ISFIFO, "a pipe", "save its content to a file first"),
    (stat.S_ISSOCK, "a socket", "save its content to a file first"),
    (stat.S_ISCHR, "a device", "give a picture file"),
    (stat.S_ISBLK, "a device", "give a picture file"),
)


def check_paths(paths: Iterable[str]) -> None:
    """Each a file that is there. Raises ImageError for the first that is not."""
    for path in paths:
        check_path(path)


def check_sources(sources: Iterable[str], remote: bool) -> None:
    """Do what `check_paths` does, for what may be data URLs, too, and addresses with `remote`."""
    for source in sources:
        if not (is_data_url(source) or (remote and is_address(source))):
            check_path(source)


def user_path(path: str) -> str:
    """Return it with "~" as a shell has it, unless a file is called so; of file:// what stands
    behind it.
    """
    if path[:7].lower() == "file://":
        bare = path[7:].removeprefix("localhost")
        return bare if os.path.lexists(bare) else os.fsdecode(unquote_to_bytes(bare))
    if not path.startswith("~") or os.path.lexists(path):
        return path
    return os.path.expanduser(path)  # noqa: PTH111  # Path raises for a user who is not there


def check_path(path: str, name: str = "") -> os.stat_result:
    """Return what the system says of a regular file at `path`, which messages call `name`. Raises
    ImageError for anything else, with the path that may have been meant.
    """
    name = name or shortened(printable(path)) or "image"
    if not path:
        raise ImageError(
            f"{name}: found an empty path, expected that of a picture; check how it is made"
        )
    _refuse_url(path)
    try:
        result = Path(user_path(path)).stat()
    except (FileNotFoundError, NotADirectoryError):
        if os.path.lexists(user_path(path)):
            raise ImageError(
                f"{name}: found a link to a file that is not there, expected a picture; check "
                "where it leads"
            ) from None
        _refuse_base64(path, name)
        _refuse_other_address(path)
        near = nearest_path(path)
        advice = f"did you mean {printable(near)!r}?" if near else "check the path"
        if not near and not re.search(r"\.\w+$|^[^\s/\\]*[/\\]\S*$", path):  # words, and no path
            advice += ", or give it as the prompt"
        raise ImageError(f"{name}: found no such file, expected a picture; {advice}") from None
    except PermissionError:
        raise not_readable(name) from None
    except (OSError, ValueError) as error:
        _refuse_base64(path, name)
        raise not_opened(name, error) from error
    for is_kind, words, advice in _KINDS:
        if is_kind(result.st_mode):
            raise ImageError(f"{name}: found {words}, expected a picture file; {advice}")
    return result


def not_readable(name: str) -> ImageError:
    return ImageError(
        f"{name}: found a file that may not be read, expected a readable one; change its "
        "permissions"
    )


def not_opened(name: str, error: Exception) -> ImageError:
    known = isinstance(error, OSError) and error.strerror
    reason = error.strerror if isinstance(error, OSError) and known else "not a usable path"
    return ImageError(
        f"{name}: found a path that cannot be opened ({reason}), expected a picture file; check "
        "the path"
    )


def _refuse_url(path: str) -> None:
    if is_address(path):
        raise ImageError(
            f"{url_name(path)}: found a web address, expected a file; have addresses fetched "
            "(allow_remote_media=True of `load`, --allow-remote-media of the command), or download "
            "the picture"
        )
    if is_data_url(path):
        raise ImageError(
            f"{printable(path[:32])}...: found a data URL, expected a file; save it as one"
        )


def _refuse_other_address(path: str) -> None:
    scheme = re.match(r"(?!file:)[a-z][a-z0-9+.-]+://", path)
    if scheme:
        raise ImageError(
            f"{url_name(path)}: found an address, {scheme[0]}, expected a file; download the "
            "picture"
        )


def _refuse_base64(path: str, name: str) -> None:
    """Refuse a text that cannot be opened because it is a picture itself."""
    if len(path) >= BASE64_CHARS and _BASE64.fullmatch("".join(path.split())):
        raise ImageError(
            f"{name[:16]}...: found {len(path):,} characters of base64, expected a path; give "
            'the bytes, base64.b64decode(...), or a data URL, "data:image/png;base64,..."'
        )
