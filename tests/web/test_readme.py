"""What README and guide say of the server works as printed: lines of curl and of Python."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import openai
import pytest
from fake_service import FakeService
from serving import data_url, running
from sounds import encoded, tones

from mtmd import load
from mtmd.cli import parser
from mtmd.clip.audio.instructions import Instructions
from mtmd.commands.serve import _settings
from mtmd.web.app import create_app

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ANSWER = (
    "A small purple square at the top, a large black cross at the center and a large purple "
    "diamond at the bottom left"
)


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl here")
def test_curl_lines():
    guide = (ROOT / "docs" / "server.md").read_text()
    block = re.search(r"^    ID=\$\(curl.*?\n\n", guide, re.M | re.S)[0]
    with running(load(device="cpu").service) as server:
        port = server.port
        done = subprocess.run(
            ["sh", "-c", block.replace("127.0.0.1:8080", f"127.0.0.1:{port}")],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=True,
        )
    assert ANSWER in done.stdout


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl here")
def test_curl_lines_about_audio_and_of_the_interface(tmp_path):
    (tmp_path / "talk.mp3").write_bytes(encoded(tones(0.5, 44_100), 44_100, "mp3", "libmp3lame"))
    service, said = FakeService(), {}
    service.words = "Ada, about engines"
    service.instructions = Instructions("down", "in {language}", "into {language}", 30.0)
    with running(service) as server:
        for page in ("api", "audio"):
            guide = (ROOT / "docs" / f"{page}.md").read_text()
            lines = re.findall(r"^    (?:ID=\$\()?curl .*?\n(?=\n)", guide, re.M | re.S)
            assert guide.count("    curl ") + guide.count("=$(curl ") == "".join(lines).count(
                "curl "
            )
            failing = "".join(lines).replace("curl ", "curl --fail-with-body ")
            done = subprocess.run(
                ["sh", "-ec", failing.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}")],
                capture_output=True,
                text=True,
                cwd=tmp_path,
                timeout=60,
            )
            assert done.returncode == 0, done
            said[page] = done.stdout
    assert '"id":"fake"' in said["api"].replace(" ", "")
    assert said["audio"].startswith("1\n00:00:00,000 --> 00:00:00,5") and (
        '"content":"Ada, about engines"' in said["audio"].replace('": "', '":"')
    )
    *_, ticket = service.tickets
    audio, text = ticket.messages[0]["content"]
    assert audio["type"] == "audio" and text["text"] == "Who is speaking?"


@pytest.mark.parametrize("page", ["README.md", "docs/server.md"])
def test_the_lines_that_make_a_key_and_serve_with_it(page, tmp_path, monkeypatch):
    making, serving = re.search(
        r"^    (\(umask .*keys.txt\))\n    mtmd (serve .*)$", (ROOT / page).read_text(), re.M
    ).groups()
    subprocess.run(
        ["sh", "-c", making.replace("python", sys.executable)], cwd=tmp_path, check=True, timeout=60
    )
    monkeypatch.chdir(tmp_path)
    settings = _settings(parser().parse_args(serving.split()))
    key = (tmp_path / "keys.txt").read_text().strip().partition(":")[2]
    client = create_app(FakeService(), settings).test_client()
    for token, status in ((key, 200), (key[:-1], 401)):
        result = client.get("/v1/models", headers={"Authorization": f"Bearer {token}"})
        assert result.status_code == status
    assert (tmp_path / "keys.txt").stat().st_mode & 0o777 == 0o600


def test_lines_of_python(capsys):
    code = re.search(r"```python\n(from openai.*?)```", README, re.S)[1]
    picture = data_url((ROOT / "examples" / "shapes.png").read_bytes())
    with running(load(device="cpu").service) as server:
        code = code.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}").replace(
            "data:image/png;base64,...", picture
        )
        scope: dict[str, object] = {}
        exec(code.replace("What is this?", "Describe the image."), scope)
        assert isinstance(scope["client"], openai.OpenAI)
        scope["client"].close()
    out = capsys.readouterr().out
    assert ANSWER in out and "'processed_size': [96, 96]" in out
