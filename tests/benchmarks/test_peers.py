"""What the comparison with other programs asks of servers."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Barrier, Thread

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import peers


def test_a_server_is_asked_for_all_answers_at_once_and_nothing_twice():
    sizes, requested, together = peers.Sizes((64,), (1, 4)), [], Barrier(4)

    class Server(BaseHTTPRequestHandler):
        def do_GET(self):
            self._reply({"status": "ok"})

        def do_POST(self):
            requested.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            together.wait(10)  # or none of them is answered
            self._reply({"usage": {"completion_tokens": 5}})

        def _reply(self, body):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            assert peers.healthy(server.server_port)
            assert peers.answers_rate(server.server_port, sizes) > 0
        finally:
            server.shutdown()
            thread.join()
    prompts = {body["messages"][0]["content"] for body in requested}
    assert len(requested) == len(prompts) == 8 and {len(p) for p in prompts} == {64}
    assert all(body["max_tokens"] == peers.DECODE for body in requested)


def test_a_server_that_does_not_start_says_why():
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(RuntimeError, match="no such model"), peers.serving(command):
        pass


@pytest.mark.parametrize("share", [0.8, 1.61])
def test_a_share_above_the_roofline_is_explained(
    share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    peers.show({("q8", "decode", 0, "mtmd"): [5.0], ("q8", "share of decode", 0, "mtmd"): [share]})
    reported = capsys.readouterr().out
    assert f"best {share:.0%}" in reported and ("processor's caches" in reported) is (share > 1)


def program(folder: Path, name: str, text: str) -> str:
    """A program that says so much."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\nimport sys\nsys.stderr.write({text!r})\nprint('7.1')\n")
    path.chmod(0o755)
    return str(path)


def test_everybody_says_which_build_it_is(tmp_path):
    program(tmp_path, "llama-bench", "load backend\nversion: 4711 (abc)\nbuilt with GCC\n")
    program(tmp_path, "llama-mtmd-cli", "usage\n")
    openvino = program(tmp_path, "python", "")
    sizes = peers.Sizes((64,), (1,))
    everybody = peers.parties(tmp_path, "x", sizes, tmp_path, [], "bf16", openvino)
    versions = {party.name: party.version() for party in everybody}
    assert versions["llama-bench"] == "llama.cpp 4711 (abc)"
    assert "unknown" in versions["llama-mtmd-cli"] and versions["OpenVINO GenAI"] == "7.1"
    assert versions["mtmd"].startswith("mtmd ") and "torch" in versions["mtmd"]
    assert peers.installed("no-such-package") == "not installed" and peers.machine().endswith(
        "cores"
    )
    alone = peers.parties(tmp_path, "x", sizes, tmp_path / "none", [], "bf16", None)
    assert "OpenVINO GenAI" not in {party.name for party in alone}


def test_an_encode_is_timed_and_what_it_held_is_measured_where_the_system_tells():
    rates = peers.encode_rates(lambda: bytearray(64 << 20))
    assert rates.pop("encode") > 0 and rates.keys() <= {peers.MEMORY, peers.PROCESS}
    assert all(size > 0 for size in rates.values())


def test_a_program_says_what_it_held_and_why_it_failed():
    held = "x = bytearray(64 << 20); print('one'); print('two')"
    text, peak = peers.output_and_peak([sys.executable, "-c", held])
    assert text == "one\ntwo\n" and 64 < peak < 200
    with pytest.raises(RuntimeError, match=r"failed: no such model$"):
        peers.output([sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(RuntimeError, match="died of signal 9"):
        peers.output([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"])
