"""Models on the hub as far as their headers tell: small parts of large files, opened like whole ones."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import gguf
import numpy as np
import pytest
from damaged_files import sound_model
from fake_hub import REPOS, address, running_hub

from mtmd.base.errors import ModelError
from mtmd.checkpoint import headers as module
from mtmd.checkpoint.headers import fetch_headers
from mtmd.checkpoint.open import open_checkpoint
from mtmd.inspect import fit as fitting
from mtmd.kernels.checkpoint.gguf_file import GgufFile
from mtmd.loading import DEMO_MODEL


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    demo = {p.name: p.read_bytes() for p in DEMO_MODEL.iterdir() if p.suffix in (".json", ".jinja")}
    demo["model.safetensors"] = (DEMO_MODEL / "model.safetensors").read_bytes()
    monkeypatch.setitem(REPOS, "org/demo", demo)
    with running_hub() as server:
        yield server


def test_a_folder_of_headers_is_opened_as_the_whole_is(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    result = fetch_headers("org/demo", tmp_path, endpoint=address(hub))
    theirs, ours = open_checkpoint(result.path), open_checkpoint(DEMO_MODEL)
    assert theirs.text == ours.text and theirs.vision == ours.vision
    assert theirs.weight_bytes == ours.weight_bytes
    read = sum(size for _, size in hub.ranges)  # type: ignore[attr-defined]
    file = tmp_path / "model.safetensors"
    assert read < file.stat().st_size / 50
    assert file.stat().st_size == (DEMO_MODEL / "model.safetensors").stat().st_size
    assert file.stat().st_blocks * 512 < file.stat().st_size / 10, "the rest is a hole"


def test_fit_of_a_name_on_the_hub_fetches_headers_alone(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested = partial(fetch_headers, endpoint=address(hub))
    monkeypatch.setattr(fitting, "fetch_headers", requested)
    result = fitting.fit("org/demo", host_memory="1GiB")
    here = fitting.fit("demo", host_memory="1GiB")
    assert result.model == "org/demo" and result.layouts == here.layouts


def test_fit_of_a_name_on_the_hub_with_weights_of_bitsandbytes(
    hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, weights = sound_model("nf4")
    whole = REPOS["org/demo"] | {"config.json": config, "model.safetensors": weights}
    monkeypatch.setitem(REPOS, "org/nf4", whole)
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(fitting, "fetch_headers", partial(fetch_headers, endpoint=address(hub)))
    result = fitting.fit("org/nf4", host_memory="1GiB")
    assert result.layouts == fitting.fit(str(tmp_path), host_memory="1GiB").layouts
    assert sum(size for _, size in hub.ranges) < len(weights) / 50  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[1]",
        b'{"x.quant_state.bitsandbytes__nf4": 1}',
        b'{"x.quant_state.bitsandbytes__nf4": {"data_offsets": [1]}}',
        b'{"x.quant_state.bitsandbytes__nf4": {"data_offsets": ["a", 2]}}',
        b'{"x.quant_state.bitsandbytes__nf4": {"data_offsets": [0, 4096]}}',
        b'{"x.quant_state.bitsandbytes__nf4": {"data_offsets": [-5, 9]}}',
    ],
)
def test_headers_that_lead_nowhere(header: bytes) -> None:
    assert module._texts(header, 100) == []


def written(path: Path, tensors: int) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("some.text", "x" * 3000)
    for number in range(tensors):
        writer.add_tensor(f"blk.{number}.weight", np.zeros((64, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_of_a_gguf_as_much_is_read_as_its_header_takes(
    hub: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "whole.gguf", 40)
    data = (tmp_path / "whole.gguf").read_bytes()
    monkeypatch.setitem(REPOS, "org/one", {"one-F32.gguf": data})
    monkeypatch.setattr(module, "FIRST_BYTES", 1000)
    folder = tmp_path / "headers"
    folder.mkdir()
    result = fetch_headers("org/one:F32", folder, endpoint=address(hub))
    ours, theirs = GgufFile(result.path), GgufFile(tmp_path / "whole.gguf")
    assert [(n, ours.meta(n)) for n in ours.names()] == [
        (n, theirs.meta(n)) for n in theirs.names()
    ]
    sizes = [size for _, size in hub.ranges]  # type: ignore[attr-defined]
    assert sizes == [1000, 1000, 2000, 4000][: len(sizes)] and sum(sizes) < len(data) / 50


def test_a_hub_that_gives_no_parts_is_not_read_to_the_end(
    hub: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.ignores_ranges = True  # type: ignore[attr-defined]
    large = REPOS["org/demo"] | {"model.safetensors": bytes(64 << 20)}
    monkeypatch.setitem(REPOS, "org/large", large)
    with pytest.raises(ModelError, match="found more; fetch it whole with 'mtmd pull'"):
        fetch_headers("org/large", tmp_path, endpoint=address(hub))
    assert hub.sent < 32 << 20, "what both ends of a connection hold"  # type: ignore[attr-defined]


def test_a_body_that_breaks_off_is_asked_for_again(
    hub: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PAUSES_S", (0.0, 0.0))
    hub.breaks = 2  # type: ignore[attr-defined]
    result = fetch_headers("org/demo", tmp_path, endpoint=address(hub))
    assert open_checkpoint(result.path).text == open_checkpoint(DEMO_MODEL).text
    assert len(hub.ranges) == 4  # type: ignore[attr-defined]
    hub.breaks = 3  # type: ignore[attr-defined]
    with pytest.raises(ModelError, match=r"fetched .* \((RemoteProtocol|\w*Read)\w*Error\); check"):
        fetch_headers("org/demo", tmp_path, endpoint=address(hub))
    assert len(hub.ranges) == 7  # type: ignore[attr-defined]


def test_before_huggingface_hub_1(
    hub: ThreadingHTTPServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which streams by the options of requests, whose responses are closed by whoever asked."""
    from huggingface_hub import utils

    closed = []

    class Response:
        def __init__(self, url: str, headers: dict[str, str]):
            self.inner = urlopen(Request(url, headers=headers))
            self.status_code, self.headers, self.url = self.inner.status, self.inner.headers, url

        def raise_for_status(self) -> None:
            assert self.status_code in (200, 206)

        def iter_content(self, size: int) -> Iterator[bytes]:
            return iter(partial(self.inner.read, size), b"")

        def __enter__(self) -> Response:
            return self

        def __exit__(self, *_: object) -> None:
            self.inner.close()
            closed.append(self.url)

    def backoff(_: str, url: str, *, headers: dict[str, str], timeout: float, stream: bool) -> Any:
        assert stream and timeout
        return Response(url, headers)

    monkeypatch.setattr(utils, "http_stream_backoff", None)
    monkeypatch.setattr(utils, "http_backoff", backoff)
    result = fetch_headers("org/demo", tmp_path, endpoint=address(hub))
    assert open_checkpoint(result.path).text == open_checkpoint(DEMO_MODEL).text
    assert len(closed) == 2


@pytest.mark.parametrize(
    ("name", "reported"),
    [
        ("org/outside:Q4_0", "lies outside"),
        ("org/missing", "neither a local folder nor found"),
        ("org/pickles", "files, which this version does not read"),
        ("org/silent", "cannot be reached"),
    ],
)
def test_refusals(
    name: str,
    reported: str,
    hub: ThreadingHTTPServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mtmd.checkpoint.hub.TIMEOUT_S", 0.3)
    with pytest.raises(ModelError, match=reported):
        fetch_headers(name, tmp_path / "models", endpoint=address(hub))
    assert not list(tmp_path.glob("*.gguf"))
