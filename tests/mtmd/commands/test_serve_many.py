"""`mtmd serve --models`: what its options say, and what it says itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from mtmd import DeviceError
from mtmd.commands import serve as serve_command
from mtmd.loaded import allocator
from mtmd.web.models.registry import Registry
from mtmd.web.server import Server


@pytest.mark.parametrize(
    "options, reported",
    [
        (["--presets", "x.json"], "--presets: needs --models"),
        (["--unload-after", "60"], "--unload-after: needs --models"),
        (["--models-max", "2"], "--models-max: needs --models"),
        (["--models", "demo", "--alias", "x"], '"aliases"'),
        (["--models", "demo", "--mmproj", "x"], '"load" of the presets'),
        (["--models", "demo", "--tp", "2"], "--tp: found with --models"),
        (["--models", "demo", "--split", "layer"], "--split: found with --models"),
        (["--models", "demo", "--fit"], "--fit: found with --models"),
        (["--models", "no/such/place/here"], "no/such/place/here"),
        (["--models", "demo", "--presets", "no.json"], "cannot be read"),
    ],
)
def test_what_does_not_go_together_is_told(mtmd, options, reported):
    result = mtmd("serve", "--port", "0", *options)
    assert result.code == 2 and reported in result.err and result.err.count("\n") == 1


def test_it_begins_without_a_model_in_memory(mtmd, monkeypatch, tmp_path):
    for name in ("_stop_on_signals", "_write_log"):  # of the whole process
        monkeypatch.setattr(serve_command, name, lambda *_: None)
    monkeypatch.setattr(serve_command, "_close_to_others", lambda _: [])
    monkeypatch.setattr(allocator, "return_freed_memory", lambda: True)
    seen, serve_really = [], Server.serve

    def serve(server, closing, busy):
        seen.append((server.draining, busy()))
        server.stop()
        serve_really(server, closing, busy)

    monkeypatch.setattr(Server, "serve", serve)
    monkeypatch.setattr(Registry, "start", lambda registry: seen.append(registry.listed()))
    models = tmp_path / "models"
    models.mkdir()
    (models / "x.gguf").write_bytes(b"GGUF" + b"0" * 60)
    (models / "gone.gguf").symlink_to("nowhere")
    named = f"demo,{models}"
    result = mtmd("serve", "--models", named, "--port", "0", "--data", str(tmp_path / "data"))
    assert result.code == 0 and seen[1] == (False, False)
    assert [(m.name, m.state) for m in seen[0]] == [("demo", "unloaded"), ("x", "unloaded")]
    assert "2 models to choose from: demo, x\n" in result.out
    assert "skipped 1: a link that leads nowhere (gone.gguf)\n" in result.err
    assert "serving at http://127.0.0.1:" in result.out and "stopped" in result.out


def test_a_fetch_is_not_waited_for_at_the_end(monkeypatch):
    ended = []
    monkeypatch.setattr(serve_command.os, "_exit", ended.append)
    for fetching, fault in ((False, None), (True, DeviceError("the device hangs")), (True, None)):
        serve_command._leave_fetch(SimpleNamespace(fetching=fetching, fault=fault))
    assert ended == [0], "a fault has a code of its own"
