"""Who may import what, by reading the imports: the folders' arrows, libraries in their places, no
family outside its file.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtmd.clip.family import FAMILIES as VISION
from mtmd.llm.family import FAMILIES as TEXT

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {  # folder -> folders beside it that it may import
    "kernels": set(),
    "clip": {"kernels"},
    "llm": {"kernels"},
    "mtmd": {"kernels", "clip", "llm"},
    "web": {"mtmd"},
}
UPWARD = {"mtmd/commands/serve.py": "web"}  # inside its function
ONLY_IN = {  # library -> the files, or folders, that may import it
    "triton": ("kernels/gpu/", "kernels/backends/gpu.py"),
    "llvmlite": ("kernels/cpu/native/",),
    "flask": ("web/",),
    "PIL": ("clip/image.py", "mtmd/media.py"),
    "jinja2": ("mtmd/chat_sandbox.py",),
    "transformers": (),
    "gguf": (),
}
WITHOUT_TORCH = (
    "llm/pages.py",
    "llm/batcher.py",
    "web/",
    "mtmd/__init__.py",
    "mtmd/cli.py",
    "mtmd/commands/",
)
ENVIRONMENT = (
    "mtmd/config.py",
    "kernels/cpu/native/compile.py",  # where the user's cache is
)
FAMILY_WORDS = re.compile(
    r"gemma|siglip|smolvlm|idefics|llava|qwen|pixtral|mistral|lfm|internvl|llama|glm|phi-?[34]|minicpm|moondream",
    re.I,
)
NOT_FAMILIES = ("llama3",)  # the name of a kind of rotary scaling, which many families have

FILES = [
    p
    for folder in MAY_IMPORT
    for p in sorted((ROOT / folder).rglob("*.py"))
    if "demo_model" not in p.parts
]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, ast.stmt]]:
    """Dotted names of what is imported; of `from a import b`, a.b, which may be a module. Relative
    imports keep their dots.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def broken_arrows(rel: str, source: str) -> list[str]:
    """What `source`, as the file `rel`, imports and may not."""
    tree, here, found = ast.parse(source), rel.split("/")[0], []
    top_level = {id(s) for s in tree.body}
    for name, statement in imports(tree):
        top, *sub = name.split(".")
        if name.startswith("."):
            found.append(f"{name}: relative; write mtmd. in full")
        elif top in MAY_IMPORT and top != "mtmd":
            found.append(
                f"{name}: by its folder's name, which is another distribution's; write mtmd.{name}"
            )
        elif top == "mtmd":
            target = sub[0] if sub and sub[0] in MAY_IMPORT else "mtmd"
            upward = UPWARD.get(rel) == target and id(statement) not in top_level
            if target != here and target not in MAY_IMPORT[here] and not upward:
                found.append(f"{name}: {here} -> {target} points up the arrow")
        if top in ONLY_IN and not rel.startswith(ONLY_IN[top] or "\0"):
            found.append(f"{name}: {top} only in {', '.join(ONLY_IN[top]) or 'tests and tools'}")
        if top == "torch" and rel.startswith(WITHOUT_TORCH) and id(statement) in top_level:
            found.append(f"{name}: {rel} has to load without torch")
    return found


def read_environment(source: str) -> list[int]:
    """Lines that read or write the process's environment."""
    ways, lines = {"environ", "environb", "getenv", "putenv"}, []
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Attribute)
            and node.attr in ways
            and isinstance(node.value, ast.Name)
            and node.value.id == "os"
        ):
            lines.append(node.lineno)
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and ways & {alias.name for alias in node.names}
        ):
            lines.append(node.lineno)
    return lines


def family_words(source: str) -> list[str]:
    """Names and texts of the code that name a family: docstrings and comments may, to say where a
    formula is from.
    """
    tree, found = ast.parse(source), []
    explained = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if "FAMILIES" in {t.id for t in targets if isinstance(t, ast.Name)}:
            explained |= {id(n) for n in ast.walk(node)}
    for node in ast.walk(tree):
        if id(node) in explained:
            continue
        text = (
            node.value
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            else getattr(node, "id", None)
            or getattr(node, "attr", None)
            or getattr(node, "name", None)
            or getattr(node, "arg", None)
        )
        if isinstance(text, str) and text not in NOT_FAMILIES and FAMILY_WORDS.search(text):
            found.append(text)
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_follow_the_arrows_and_libraries_stay_in_their_places(path):
    assert broken_arrows(name_of(path), path.read_text()) == []


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_the_environment_is_read_in_one_place(path):
    assert name_of(path) in ENVIRONMENT or read_environment(path.read_text()) == []


@pytest.mark.parametrize("path", [p for p in FILES if "families" not in p.parts], ids=name_of)
def test_no_family_is_named_outside_its_file(path):
    assert family_words(path.read_text()) == []


def family_files() -> list[Path]:
    return [
        p
        for folder in ("clip", "llm")
        for p in sorted((ROOT / folder / "families").glob("*.py"))
        if p.stem != "__init__"
    ]


def test_the_tables_name_every_family_file_and_nothing_else():
    for folder, table in (("clip", VISION), ("llm", TEXT)):
        for names in (
            [n for e in table for n in e.model_types],
            [n for e in table for n in e.gguf],
        ):
            assert len(names) == len(set(names))
        files = {
            f"mtmd.{folder}.families.{p.stem}"
            for p in family_files()
            if p.is_relative_to(ROOT / folder)
        }
        assert {entry.module for entry in table} == files


@pytest.mark.parametrize("path", family_files(), ids=name_of)
def test_a_family_stands_alone_and_has_a_test(path):
    assert [p for p in (ROOT / "tests").rglob("test_*.py") if path.stem in p.stem], (
        f"no tests/**/test_*{path.stem}*.py"
    )
    others = {p.stem for p in family_files()} - {path.stem}
    named = {
        name.split(".")[3]
        for name, _ in imports(ast.parse(path.read_text()))
        if re.match(r"mtmd\.\w+\.families\.", name)
    }
    assert not named & others, "families share by calling blocks.py, never one another"


def test_the_package_loads_without_torch():
    code = (
        "import mtmd, mtmd.cli, sys; sys.exit(' '.join({'torch', 'numpy', 'PIL', 'jinja2'} & "
        "set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_all_folders_were_looked_at():
    assert {p.relative_to(ROOT).parts[0] for p in FILES} >= {
        "kernels",
        "clip",
        "llm",
        "mtmd",
    } and len(FILES) > 50


@pytest.mark.parametrize(
    "rel, source",
    [
        ("kernels/graph.py", "from mtmd.clip.encoder import Encoder"),
        ("clip/blocks.py", "from mtmd import llm"),
        ("llm/engine.py", "import mtmd.clip"),
        ("clip/blocks.py", "import mtmd.model"),
        ("mtmd/model.py", "from mtmd.web.app import run"),
        ("mtmd/commands/serve.py", "from mtmd.web.app import run"),
        ("web/app.py", "from mtmd.kernels.graph import Node"),
        ("clip/blocks.py", "import kernels.graph"),
        ("clip/blocks.py", "from . import encoder"),
        ("kernels/flash.py", "import triton.language"),
        ("clip/blocks.py", "from PIL import Image"),
        ("mtmd/cli.py", "def f():\n    import jinja2"),
        ("llm/engine.py", "import transformers"),
        ("llm/pages.py", "import torch"),
        ("kernels/weights/gguf_file.py", "from gguf import GGUFReader"),
    ],
)
def test_a_broken_rule_is_found(rel, source):
    assert len(broken_arrows(rel, source)) == 1


def test_what_is_allowed_is_not_found():
    assert (
        broken_arrows("mtmd/commands/serve.py", "def run():\n    from mtmd.web.app import app")
        == []
    )
    assert (
        broken_arrows(
            "mtmd/bridge.py",
            "import torch\nfrom mtmd.clip.encoder import Encoder\nfrom mtmd.media import x",
        )
        == []
    )
    assert broken_arrows("mtmd/commands/warmup.py", "def run():\n    import torch") == []


def test_reading_the_environment_is_found():
    for source in (
        "x = os.environ['A']",
        "x = os.getenv('A')",
        "from os import environ",
        "def f(): del os.environ['A']",
    ):
        assert len(read_environment(source)) == 1
    assert read_environment("import os\nos.cpu_count()\nself.environ = 1") == []


def test_naming_a_family_is_found():
    assert family_words("if kind == 'gemma3': pass") == ["gemma3"]
    assert family_words("def is_qwen(x): return x.llava") == ["is_qwen", "llava"]
    assert (
        family_words(
            '"""As Gemma does."""\nFAMILIES = {"gemma3": "mtmd.clip.families.gemma3"}  # llama'
        )
        == []
    )
