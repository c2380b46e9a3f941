"""An editable install has the package's form in links, for type checkers."""

from __future__ import annotations

import zipfile
from pathlib import Path

from editable_types import ROOT, add_file, link


def test_the_links_have_the_form_of_the_package(tmp_path: Path) -> None:
    (tmp_path / "tree" / "old").mkdir(parents=True)
    package = link(tmp_path / "tree") / "mtmd"
    assert not (tmp_path / "tree" / "old").exists()
    for file in ("py.typed", "model.py", "commands/serve.py", "kernels/graph.py", "web/app.py"):
        assert (package / file).exists(), file
    assert (package / "llm").resolve() == ROOT / "llm"


def test_a_wheel_gets_a_file_and_its_line(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        made.writestr("a.py", "x")
        made.writestr("a-1.dist-info/RECORD", "a.py,,\n")
    add_file(wheel, "a.pth", b"/there\n")
    with zipfile.ZipFile(wheel) as read:
        assert read.read("a.pth") == b"/there\n" and read.read("a.py") == b"x"
        record = read.read("a-1.dist-info/RECORD").decode().splitlines()
    # The digest by hand: base64 of SHA-256, without its padding.
    assert record == ["a.py,,", "a.pth,sha256=w4n_vD6p4tzo_8ACm01qGugbIS6Hho8KH1PWUMVvmjA,7"]
