"""What the README says of the server works as printed: its curl lines, and its lines of Python."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import openai
import pytest
from serving import data_url, running

from mtmd import load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
ANSWER = (
    "A small purple square at the top, a large black cross at the center and a large purple "
    "diamond at the bottom left"
)


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl here")
def test_curl_lines():
    block = re.search(r"^    ID=\$\(curl.*?\n\n", README, re.M | re.S)[0]
    with running(load(device="cpu").service) as server:
        port = int(server.effective_port)
        done = subprocess.run(
            ["sh", "-c", block.replace("127.0.0.1:8080", f"127.0.0.1:{port}")],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=True,
        )
    assert ANSWER in done.stdout


def test_lines_of_python(capsys):
    code = re.search(r"```python\n(from openai.*?)```", README, re.S)[1]
    picture = data_url((ROOT / "examples" / "shapes.png").read_bytes())
    with running(load(device="cpu").service) as server:
        code = code.replace("127.0.0.1:8080", f"127.0.0.1:{int(server.effective_port)}").replace(
            "data:image/png;base64,...", picture
        )
        scope: dict[str, object] = {}
        exec(code.replace("What is this?", "Describe the image."), scope)
        assert isinstance(scope["client"], openai.OpenAI)
        scope["client"].close()
    out = capsys.readouterr().out
    assert ANSWER in out and "'processed_size': [96, 96]" in out
