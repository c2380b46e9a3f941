"""Who may import what, by reading the imports: the rooms' arrows and those of the folders inside
them, libraries in their places, no family outside its file.
"""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import pytest

from mtmd.clip.audio_family import FAMILIES as AUDIO
from mtmd.clip.family import FAMILIES as VISION
from mtmd.llm.family import FAMILIES as TEXT

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {  # room -> rooms that it may import, beside the ground
    "kernels": set(),
    "clip": {"kernels"},
    "llm": {"kernels"},
    "mtmd": {"kernels", "clip", "llm"},
    "web": {"mtmd"},
}
GROUND = "mtmd/base/"  # what every room may import, and imports nothing of ours
UPWARD = {  # inside their functions
    "mtmd/commands/serve.py": "web",
    "mtmd/commands/ray_options.py": "web",
    "mtmd/commands/history.py": "web",
}
# Inside a room: what is more general stands first, and imports nothing that stands after it. A file
# that lies flat in its room counts by its name; names in one row do not import each other.
ORDER = {
    "kernels": (
        ("dtype", "resources"),  # what is shared in a process
        ("graph", "quantization"),  # what a value is
        # where weights come from; what a kernel says of itself, and what came of trying it
        ("checkpoint", "kernel", "trials"),
        ("ops",),  # what can be computed
        (
            "layers",
            "cpu",
            "gpu",
            "parallel",
        ),  # what families call; how ops are computed; by several
        ("backends",),  # where
        ("plan",),  # in which order, and run
        ("estimate",),  # how long it would take on a GPU that is not here
        ("report",),  # and what came of it
    ),
    "clip": (
        (
            "token_budget",
            "tasks",
            "image",
            "blocks",
            "clipped_linear",
            "marks",
            "grids",
            "media_file",
        ),
        (
            "resolution",
            "pictures_first",
            "start_token",
            "instructed",
            "qformer",
            "sam",
        ),  # from pixels to tiles; an encoder that several families have
        ("video",),  # which frames of a file, and how they become tiles
        ("audio",),  # samples of a file, and how they become tiles
        ("family", "families"),  # the table loads a family's file by its name
        ("audio_family",),  # likewise
        ("preprocessing", "packing"),
        ("encoder", "dual"),
        ("batch_shapes", "warmup"),
    ),
    "llm": (
        ("experts", "parameters", "state", "tokenizer"),
        ("batch", "gguf_keys", "sampling"),  # what one forward reads, how its logits are read
        ("inputs", "plan_maker"),
        ("blocks", "family", "per_layer"),
        ("layer_kinds", "mamba2"),
        ("engine", "families"),  # neither knows the other: a family builds, the engine runs
        ("batch_shapes", "warmup"),
    ),
    "mtmd": (
        ("base",),  # the ground
        ("chat_template", "openmp", "receipt", "tools"),
        ("thinking",),  # over templates and tools
        ("environment", "options", "prompt_logprobs"),
        ("checkpoint", "events"),
        ("ranks",),  # the other processes of a model that several share
        ("loaded",),  # a model in memory, without anybody to ask it
        ("finding", "prompt"),  # names into checkpoints; messages into spans
        # requests into answers; answers on a screen; audio written down
        ("service", "display", "transcription"),
        ("chat",),  # a model makes it, and types name the model
        ("batch", "model"),
        ("loading", "terminal"),
        ("bench", "cluster", "convert", "embedding"),
        ("engine_process",),  # a model of either kind, in a process of its own
        ("inspect",),  # whose predictions take a model's shape from the benchmark
        ("commands", "follower", "__init__"),
        ("cli",),
        ("__main__",),
    ),
    "web": (
        ("api_keys", "mistakes", "native_threads"),
        ("settings",),
        ("errors", "sse", "store", "served_model", "telemetry"),
        ("bodies", "refusal", "clients", "unix_socket", "rate_limit"),
        ("access", "headers", "intake"),  # what may come in
        ("connection",),  # one of the web server's
        ("models",),  # which of several answers it
        ("answering",),  # a request of any interface answered
        ("interfaces", "page", "server", "status"),  # for programs, and for people
        ("app", "small_apps"),
        ("replicas",),  # several servers as one
    ),
}
ONLY_IN = {  # library -> the files, or folders, that may import it
    "triton": ("kernels/gpu/",),
    "llvmlite": ("kernels/cpu/native/",),
    "av": ("clip/audio/decode.py", "clip/video/container.py"),
    "flask": ("web/",),
    "gevent": (
        "mtmd/__main__.py",  # before anything else is imported
        "web/connection.py",
        "web/native_threads.py",
        "web/server.py",
    ),
    "ray": ("mtmd/cluster/connect.py", "web/replicas/"),
    "aiohttp": ("web/replicas/replica.py",),
    "fsspec": ("mtmd/cluster/locations.py",),
    "PIL": (
        "clip/image/decode.py",
        "clip/image/formats.py",
        "clip/image/resize.py",
        "clip/video/animation.py",
        "clip/video/isolated.py",
        "mtmd/prompt/load_image.py",
    ),
    "jinja2": ("mtmd/chat_template/jinja_sandbox.py",),
    "transformers": (),
    "gguf": (),
}
WITHOUT_TORCH = (
    "llm/engine/pages.py",
    "llm/engine/scheduler.py",
    "llm/engine/sequence.py",
    "llm/engine/speculation.py",
    "kernels/plan/steps.py",
    "kernels/report/facts.py",
    "kernels/report/report_text.py",
    "kernels/report/warmup_report.py",
    "mtmd/base/text.py",
    "kernels/trials.py",
    "web/",
    "mtmd/__init__.py",
    "mtmd/cli.py",
    "mtmd/commands/",
    "mtmd/options/keywords.py",
    "mtmd/prompt/picture_paths.py",
    "mtmd/checkpoint/hub.py",
    "mtmd/checkpoint/cached_models.py",
    "mtmd/checkpoint/collection.py",
)
ENVIRONMENT = (
    "mtmd/environment.py",
    "mtmd/openmp.py",  # set, before torch reads it
    "mtmd/commands/completion.py",  # what a shell sets on TAB
    "mtmd/base/files.py",  # where the user's cache is
    "mtmd/base/isolation/fork_server.py",  # set, for its workers
)
# Ollama and llama.cpp are programs.
FAMILY_WORDS = re.compile(
    r"gemma|mobilenet|siglip|smolvlm|idefics|llava|qwen|pixtral|mistral|lfm|internvl|(?<!o)llama(?![._]cpp|-imatrix)|glm|cohere|compass|aya[-_ ]?vision|ovis2|phi-?[1-4]|minicpm|moondream|voxtral|ultravox|meralion|flamingo|paddle|hunyuan|deepseek[-_ ]?(ocr|vl)|unlimited[-_]ocr|got[-_ ]?ocr|dots[-_.]m?ocr|kimi|moonvit|exaone|ernie|\baria(?!-)\b|janus|granite|trocr|donut|florence|nemotron|step3|step_robotics|\bblip|\bopt[-_ ]?\d",
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


@cache
def nodes_of(source: str) -> tuple[ast.AST, ...]:
    """All of them, the module first: a file is read by many tests and walked through once."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def imports(source: str) -> tuple[tuple[str, ast.stmt], ...]:
    """Dotted names of what is imported; of `from a import b`, a.b, which may be a module. Relative
    imports keep their dots.
    """
    result: list[tuple[str, ast.stmt]] = []
    for node in nodes_of(source):
        if isinstance(node, ast.Import):
            result += ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            result += ((f"{base}.{alias.name}", node) for alias in node.names)
    return tuple(result)


@pytest.fixture(scope="module", autouse=True)
def trees_are_let_go() -> Iterator[None]:
    """A million objects: no garbage meanwhile, and none that later collections look through."""
    gc.disable()
    yield
    for made in (nodes_of, imports, dependencies):
        made.cache_clear()
    gc.enable()


def broken_arrows(rel: str, source: str) -> list[str]:
    """What `source`, as the file `rel`, imports and may not."""
    module, here, result = nodes_of(source)[0], rel.split("/")[0], []
    assert isinstance(module, ast.Module)
    top_level = {id(s) for s in module.body}
    for name, statement in imports(source):
        top, *sub = name.split(".")
        if name.startswith("."):
            result.append(f"{name}: relative; write mtmd. in full")
        elif top in MAY_IMPORT and top != "mtmd":
            result.append(
                f"{name}: by its folder's name, which is another distribution's; write mtmd.{name}"
            )
        elif top == "mtmd":
            if sub[:1] == ["base"]:
                continue
            target = sub[0] if sub and sub[0] in MAY_IMPORT else "mtmd"
            if rel.startswith(GROUND):
                result.append(f"{name}: the ground imports nothing of ours")
            upward = UPWARD.get(rel) == target and id(statement) not in top_level
            if target != here and target not in MAY_IMPORT[here] and not upward:
                result.append(f"{name}: {here} -> {target} points up the arrow")
        if top in ONLY_IN and not rel.startswith(ONLY_IN[top] or "\0"):
            result.append(f"{name}: {top} only in {', '.join(ONLY_IN[top]) or 'tests and tools'}")
        if top == "torch" and rel.startswith(WITHOUT_TORCH) and id(statement) in top_level:
            result.append(f"{name}: {rel} has to load without torch")
    return result


def read_environment(source: str) -> list[int]:
    """Lines that read or write the process's environment."""
    ways, lines = {"environ", "environb", "getenv", "putenv"}, []
    for node in nodes_of(source):
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
    nodes, result = nodes_of(source), []
    explained = {id(n.value) for n in nodes if isinstance(n, ast.Expr)}
    for node in nodes:
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        if "FAMILIES" in {t.id for t in targets if isinstance(t, ast.Name)}:
            explained |= {id(n) for n in ast.walk(node)}
    for node in nodes:
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
            result.append(text)
    return result


def broken(rule: Callable[[Path], list[Any]], files: Iterable[Path]) -> dict[str, list[Any]]:
    """What a rule finds, by file."""
    match = {name_of(path): rule(path) for path in files}
    return {name: result for name, result in match.items() if result}


def test_imports_follow_the_arrows_and_libraries_stay_in_their_places():
    assert broken(lambda p: broken_arrows(name_of(p), p.read_text()), FILES) == {}


def part_of(path: Path) -> tuple[str, str]:
    """The room a file lies in, and its folder there, or its own name where it lies flat."""
    room, *rest = path.relative_to(ROOT).parts
    return room, rest[0].removesuffix(".py")


def module_name(path: Path) -> str:
    """As it is imported."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "mtmd" else ("mtmd", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@lru_cache(maxsize=1)
def dependencies() -> dict[Path, set[Path]]:
    """Which files each imports, also inside functions and for types alone."""
    modules = {module_name(p): p for p in FILES}

    def file_of(name: str) -> Path | None:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return modules.get(name)

    result = {}
    for path in FILES:
        targets = {file_of(name) for name, _ in imports(path.read_text())}
        # The package itself offers public names only: who imports one imports where it lies.
        result[path] = {t for t in targets if t and t != path and module_name(t) != "mtmd"}
    return result


def circle(graph: dict[Any, set[Any]]) -> list[Any]:
    """The nodes of one circle, none where there is none."""
    state: dict[Any, str] = {}
    way: list[Any] = []

    def visit(node: Any) -> list[Any]:
        state[node] = "open"
        way.append(node)
        for other in graph.get(node, ()):
            if state.get(other) == "open":
                return way[way.index(other) :]
            if other not in state and (result := visit(other)):
                return result
        state[node] = "closed"
        way.pop()
        return []

    return next((result for node in graph if node not in state and (result := visit(node))), [])


@pytest.mark.parametrize("room", ORDER)
def test_inside_a_room_imports_run_down(room):
    level = {name: i for i, names in enumerate(ORDER[room]) for name in names}
    files = [p for p in FILES if part_of(p)[0] == room and not empty(p)]
    assert {part_of(p)[1] for p in files} <= set(level), "a new folder or file needs its place"
    upward = [
        f"{name_of(path)} -> {name_of(target)}"
        for path, targets in dependencies().items()
        for target in targets
        if part_of(path)[0] == part_of(target)[0] == room
        and part_of(path) != part_of(target)
        and level[part_of(target)[1]] >= level[part_of(path)[1]]
    ]
    assert upward == []


def empty(path: Path) -> bool:
    """Return whether a file has nothing but a docstring."""
    if path.name != "__init__.py":
        return False
    tree = ast.parse(path.read_bytes())
    return len(tree.body) == (ast.get_docstring(tree) is not None)


def test_no_imports_run_in_a_circle():
    graph = dependencies()
    assert [name_of(p) for p in circle(graph)] == []
    folders: dict[tuple[str, str], set[tuple[str, str]]] = {}
    for path, targets in graph.items():
        others = {part_of(t) for t in targets} - {part_of(path)}
        folders.setdefault(part_of(path), set()).update(others)
    del folders["mtmd", "commands"]  # whose one upward import is in UPWARD
    assert circle(folders) == []


def test_a_circle_is_seen():
    assert circle({1: {2}, 2: {3}, 3: {2}}) == [2, 3]
    assert circle({1: {2, 3}, 2: {3}, 3: set()}) == []


def test_the_guide_names_what_is_there():
    """Every folder has a line in CONTRIBUTING.md, and every path there is a file or a folder."""
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    folders = {name_of(p.parent) + "/" for p in FILES if p.name != "__init__.py"}
    alone = {f for f in folders if not re.search(r"(families|gpu)/.+/$", f)}  # not inside those
    table = set(re.findall(r"`([\w/]+/)`", guide))
    assert alone <= table
    tree = (*MAY_IMPORT, "tests", "tools", "docs", "benchmarks")
    named = re.findall(rf"(?<![\w/.-])(?:{'|'.join(tree)})/[\w/]*(?:\.\w+)?", guide)
    assert [n for n in named if "NAME" not in n and not (ROOT / n).exists()] == []


def test_every_folder_is_installed():
    """The package's folders are listed in pyproject.toml; a wheel holds nothing else."""
    table = re.search(
        r"^packages = \[\n(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S
    )
    assert table
    assert set(re.findall(r'"([\w.]+)"', table[1])) == {
        module_name(p) for p in FILES if p.name == "__init__.py"
    } | {"mtmd.demo_model"}


def test_the_environment_is_read_in_one_place():
    others = [p for p in FILES if name_of(p) not in ENVIRONMENT]
    assert broken(lambda p: read_environment(p.read_text()), others) == {}


# Built-in chat templates, and layouts of files, are known by the names of those who use them.
NAMED = ("built_in_templates.py", "ollama_layout.py", "vocabulary_files.py")
SHARED = [p for p in FILES if "families" not in p.parts and p.name not in NAMED]


def test_no_family_is_named_outside_its_file():
    assert broken(lambda p: family_words(p.read_text()), SHARED) == {}


def families(folder: str) -> dict[str, list[Path]]:
    """The files of each family of a room, by its name: one, or those of a folder."""
    result: dict[str, list[Path]] = {}
    for path in sorted((ROOT / folder / "families").rglob("*.py")):
        if path.stem != "__init__":
            name = path.relative_to(ROOT / folder / "families").parts[0]
            result.setdefault(name.removesuffix(".py"), []).append(path)
    return result


FAMILY_FILES = [
    (folder, name, path)
    for folder in ("clip", "llm")
    for name, paths in families(folder).items()
    for path in paths
]


def test_the_tables_name_every_family_and_nothing_else():
    for folder, table in (("clip", VISION), ("llm", TEXT)):
        for names in (
            [n for e in table for n in e.model_types],
            [n for e in table for n in e.gguf],
        ):
            assert len(names) == len(set(names))
        modules = {
            ".".join(("mtmd", *path.relative_to(ROOT).with_suffix("").parts))
            for paths in families(folder).values()
            for path in paths
        }
        assert {entry.module for entry in table} <= modules
        assert len({entry.module for entry in table}) == len(table)
        every = (*table, *(AUDIO if folder == "clip" else ()))
        assert {entry.module for entry in every} <= modules
        assert {entry.module.split(".")[3] for entry in every} == set(families(folder))


@pytest.mark.parametrize(
    ("folder", "family", "path"), FAMILY_FILES, ids=[name_of(path) for _, _, path in FAMILY_FILES]
)
def test_a_family_stands_alone_and_has_a_test(folder, family, path):
    assert [p for p in (ROOT / "tests").rglob("test_*.py") if family in p.stem], (
        f"no tests/**/test_*{family}*.py"
    )
    named = {
        name.split(".")[3]
        for name, _ in imports(path.read_text())
        if name.startswith(f"mtmd.{folder}.families.")
    }
    assert named <= {family}, "families share by calling blocks.py, never one another"


def test_what_families_share_imports_none_of_them():
    def families_named(path: Path) -> list[str]:
        names = [name for name, _ in imports(path.read_text())]
        return [name for name in names if re.match(r"mtmd\.\w+\.families\b", name)]

    assert broken(families_named, SHARED) == {}


def test_the_package_loads_without_torch():
    code = (
        "import mtmd, mtmd.cli, sys; sys.exit(' '.join({'torch', 'numpy', 'PIL', 'jinja2'} & "
        "set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


NO_IMPORT = """
import importlib, sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        assert name not in {"torch", "triton", "numba", "llvmlite", "transformers"}, name

sys.meta_path.insert(0, Refuses())
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def loaded_without_torch(names: Iterable[str]) -> str:
    """What a fresh interpreter says, which refuses torch and the like: the files through which they
    are reached are in its traceback.
    """
    done = subprocess.run(
        [sys.executable, "-c", NO_IMPORT, *names],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.stderr


def test_the_web_process_loads_without_torch():
    """All of the server, and whatever else the process of `mtmd serve` imports."""
    web = {module_name(p) for p in FILES if part_of(p)[0] == "web"}
    others = {
        "mtmd.engine_process.supervisor",
        "mtmd.clip.image.isolated",
        "mtmd.commands.serve",
        "mtmd.loaded.allocator",
        "mtmd.loaded.interpreter",
    }
    replicas = {name for name in web if name.startswith("mtmd.web.replicas")}  # Ray's
    assert loaded_without_torch(sorted(others | web - replicas)) == ""


def test_the_way_to_torch_is_told():
    reported = loaded_without_torch(["mtmd.loading"])
    assert reported.endswith("AssertionError: torch\n") and "mtmd/loading.py" in reported


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
        ("llm/engine/engine.py", "import mtmd.clip"),
        ("clip/blocks.py", "import mtmd.model"),
        ("mtmd/model.py", "from mtmd.web.app import run"),
        ("mtmd/commands/serve.py", "from mtmd.web.app import run"),
        ("web/app.py", "from mtmd.kernels.graph import Node"),
        ("clip/blocks.py", "import kernels.graph"),
        ("clip/blocks.py", "from . import encoder"),
        ("kernels/plan/flash_choice.py", "import triton.language"),
        ("clip/blocks.py", "from PIL import Image"),
        ("mtmd/cli.py", "def f():\n    import jinja2"),
        ("llm/engine/engine.py", "import transformers"),
        ("llm/engine/pages.py", "import torch"),
        ("kernels/checkpoint/gguf_file.py", "from gguf import GGUFReader"),
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
            "mtmd/prompt/bridge.py",
            "import torch\nfrom mtmd.clip.encoder import Encoder\nfrom mtmd.prompt.load_image import x",
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


def test_the_types_of_public_names_are_those_of_the_table():
    """mtmd/__init__.py has them twice: for type checkers, and to be imported when asked for."""
    import mtmd

    tree = ast.parse((ROOT / "mtmd" / "__init__.py").read_text())
    typed = {
        name.rpartition(".")[::2]
        for statement in tree.body
        if isinstance(statement, ast.If)
        for name, _ in imports(statement)
    }
    assert typed == {(module, name) for name, module in mtmd._LOCATION_OF.items()}
