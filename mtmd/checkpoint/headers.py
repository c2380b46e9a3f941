"""A model on the Hugging Face hub as far as its headers tell: configuration and tokenizer, and of
each weight file what stands before the data. The rest of it is a hole, a part of the file that has
a length and takes no room, so that it is opened as any other and must not be read; the short texts
in which bitsandbytes describes each weight are there, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mtmd.base.errors import ModelError
from mtmd.checkpoint.file_names import is_projector
from mtmd.checkpoint.hub import (
    TIMEOUT_S,
    Result,
    ask_hub,
    check_files,
    fetch_tokenizer,
    parse_name,
    progress_bars,
)
from mtmd.kernels.checkpoint.quantized.bitsandbytes import STATE, STATE_BYTES_MAX

FIRST_BYTES = 4 << 20  # of a GGUF, whose header's length is not told; most have more
MAX_BYTES = 128 << 20  # of one header
TEXTS_MAX = 1 << 14  # of one file, a request each
PIECE_BYTES = 1 << 16  # of a response, read at once
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # before a part that broke off is asked for again
LENGTH = 8  # bytes that say how long the header of a safetensors file is


def fetch_headers(model: str, folder: Path, *, endpoint: str | None = None) -> Result:
    """`org/name[:TYPE][@revision]` in `folder`. Raises ModelError: what the hub says, or a header
    that is none.
    """
    from huggingface_hub import snapshot_download

    name = parse_name(model)
    info = ask_hub(model, name.repo, name.revision, endpoint, metadata=True)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    requested = check_files(model, name.type, list(sizes))
    weights = [file for file in requested if file.endswith((".safetensors", ".gguf"))]
    commit = info.sha or name.revision
    try:
        if others := [file for file in requested if file not in weights]:
            with progress_bars(False):
                snapshot_download(
                    name.repo,
                    revision=commit,
                    local_dir=folder,
                    endpoint=endpoint,
                    allow_patterns=others,
                )
        for file in weights:
            path = _inside(folder, file, model)
            read = _reader(name.repo, file, commit, endpoint, model)
            if file.endswith(".gguf"):
                _write_gguf(path, sizes[file], read)
            else:
                _write_safetensors(path, sizes[file], read)
        fetch_tokenizer(folder, endpoint=endpoint)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {model!r}: headers could not be fetched from the Hugging Face hub "
            f"({type(error).__name__}); check network and disk, or fetch it whole with 'mtmd pull'"
        ) from error
    if name.type is None:
        return Result(folder)
    projector = next((folder / file for file in weights if is_projector(file)), None)
    return Result(folder / weights[0], projector)


def _inside(folder: Path, file: str, model: str) -> Path:
    path = (folder / file).resolve()
    if folder.resolve() not in path.parents:
        raise ModelError(
            f"model {model!r} has a file {file!r:.80}, which lies outside; choose another one"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _reader(
    repo: str, file: str, commit: str | None, endpoint: str | None, model: str
) -> Callable[[int, int], bytes]:
    """Reads the bytes of a file from one place to another. Raises ModelError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    url = hf_hub_url(repo, file, revision=commit, endpoint=endpoint)

    def read(start: int, stop: int) -> bytes:
        headers: dict[str, Any] = {
            **build_hf_headers(),
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }
        data, broken = _body(url, headers, stop - start)
        for pause in PAUSES_S:
            if broken is None:
                break
            time.sleep(pause)
            data, broken = _body(url, headers, stop - start)
        if broken is not None:
            raise broken
        if len(data) != stop - start:
            more = "more" if len(data) > stop - start else f"{len(data)}"
            raise ModelError(
                f"model {model!r}: asked for {stop - start} bytes of {file}, found {more}; "
                "fetch it whole with 'mtmd pull'"
            )
        return data

    return read


def _body(url: str, headers: dict[str, Any], count: int) -> tuple[bytes, Exception | None]:
    """Return what has come, and why no more. That is not raised while the response is open:
    huggingface_hub would take it for an error of its own request, and ask once more.
    """
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    data, broken = bytearray(), None
    with _streamed(url, headers) as (response, pieces):
        hf_raise_for_status(response)
        try:
            for piece in pieces:
                data += piece
                if len(data) > count:  # a mirror that gives no parts, and sends it whole
                    break
        except Exception as error:  # each HTTP library has its own
            broken = error
    return bytes(data), broken


@contextmanager
def _streamed(url: str, headers: dict[str, Any]) -> Iterator[tuple[Any, Iterator[bytes]]]:
    """A response whose body is not read, and the pieces of that, as they come."""
    from huggingface_hub import utils

    stream: Any = getattr(utils, "http_stream_backoff", None)
    if stream is not None:  # from 1.0 on, by httpx
        with stream("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
            yield response, response.iter_bytes(PIECE_BYTES)
        return
    get: Any = utils.http_backoff  # type: ignore[attr-defined]
    with get("GET", url, headers=headers, timeout=TIMEOUT_S, stream=True) as response:
        yield response, response.iter_content(PIECE_BYTES)


def _write_safetensors(path: Path, size: int, read: Callable[[int, int], bytes]) -> None:
    if size < LENGTH:
        _with_hole(path, b"", size)  # whoever opens it says what is wrong
        return
    head = read(0, LENGTH)
    stop = min(LENGTH + int.from_bytes(head, "little"), size, MAX_BYTES)
    header = read(LENGTH, stop) if stop > LENGTH else b""
    _with_hole(path, head + header, size)
    with path.open("r+b") as file:
        for start, end in _texts(header, size - stop):
            file.seek(stop + start)
            file.write(read(stop + start, stop + end))


def _texts(header: bytes, size: int) -> list[tuple[int, int]]:
    """Return where bitsandbytes' descriptions of weights lie among `size` bytes of data. A header
    that is damaged has none: whoever opens it says what is wrong.
    """
    try:
        entries = json.loads(header)
        spans = [tuple(entry["data_offsets"]) for name, entry in entries.items() if STATE in name]
        within = [(a, b) for a, b in spans if 0 <= a < b <= min(size, a + STATE_BYTES_MAX)]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return []
    return within[:TEXTS_MAX]


def _write_gguf(path: Path, size: int, read: Callable[[int, int], bytes]) -> None:
    """More of it until its header is whole: the data begins within what is there."""
    from mtmd.kernels.checkpoint.gguf_file import header_bytes

    data = b""
    while True:
        stop = min(max(2 * len(data), FIRST_BYTES), size)
        data += read(len(data), stop)
        _with_hole(path, data, size)
        with suppress(ModelError):
            if header_bytes(path) <= len(data):
                return
        if stop == size or stop >= MAX_BYTES:
            return  # as above


def _with_hole(path: Path, data: bytes, size: int) -> None:
    path.write_bytes(data)
    os.truncate(path, size)
