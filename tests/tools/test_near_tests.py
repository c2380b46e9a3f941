"""Which test files are near to what was changed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from near_tests import changed_files, module_of, near

FILES = {
    "clip/image/decode.py": "",
    "clip/image/limits.py": "",
    "web/static/chat/boxes.js": "",
    "tests/clip/image/test_decode.py": "from mtmd.clip.image.decode import open_picture\n",
    "tests/clip/image/test_speed.py": "from mtmd.clip.image import decode, limits\n",
    "tests/clip/image/test_more.py": "from mtmd.clip.image import (\n    decode,\n)\n",
    "tests/clip/image/test_other.py": "from mtmd.clip.image.decode_more import x\n",
    "tests/web/page/test_boxes.py": "",
    "tests/web/test_far.py": "import mtmd.clip.image.limits\n",
    "docs/index.md": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("clip/image/decode.py", ["decode", "more", "speed"]),
        ("clip/image/limits.py", ["speed"]),
        ("tests/clip/image/test_other.py", ["other"]),
        ("web/static/chat/boxes.js", ["boxes"]),
        ("docs/index.md", []),
        ("tests/clip/image/test_gone.py", []),
    ],
)
def test_by_name_folder_and_import(root: Path, changed: str, expected: list[str]) -> None:
    assert [Path(path).stem.removeprefix("test_") for path in near(root, [changed])] == expected


def test_from_anywhere_where_its_folder_has_none(root: Path) -> None:
    for name in ("speed", "more"):
        (root / f"tests/clip/image/test_{name}.py").unlink()
    assert near(root, ["clip/image/limits.py"]) == ["tests/web/test_far.py"]
    assert near(root, ["clip/image/limits.py"], maximum=0) == []


def test_each_is_named_once(root: Path) -> None:
    both = near(root, ["clip/image/limits.py", "clip/image/decode.py"])
    assert sorted(both) == sorted(set(both)) and len(both) == 3


@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("kernels/graph.py", "mtmd.kernels.graph"),
        ("mtmd/model.py", "mtmd.model"),
        ("web/page/__init__.py", "mtmd.web.page"),
        ("benchmarks/peers.py", "peers"),
        ("benchmarks/gpu_kernels/parts.py", "gpu_kernels.parts"),
        ("web/static/chat/boxes.js", ""),
    ],
)
def test_names_of_modules(file: str, module: str) -> None:
    assert module_of(Path(file)) == module


def test_changes_since_the_branch_left_main(root: Path) -> None:
    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main")
        subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    git("commit", "-m", "second", "--allow-empty")
    (root / "docs/index.md").write_text("words")
    assert changed_files(root, None) == ["docs/index.md"]
    git("commit", "-am", "third")
    assert changed_files(root, None) == ["docs/index.md"]  # the last commit
    git("checkout", "-b", "work")
    (root / "clip/image/decode.py").write_text("x = 1\n")
    git("commit", "-am", "fourth")
    (root / "clip/image/limits.py").unlink()
    (root / "new.py").write_text("")
    assert changed_files(root, None) == ["clip/image/decode.py", "new.py"]
    assert changed_files(root, "HEAD") == ["new.py"]
    assert changed_files(root, "HEAD~1") == ["clip/image/decode.py", "new.py"]
