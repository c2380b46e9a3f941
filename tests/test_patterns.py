"""Every regular expression of the package and of its page, run over texts that are made to have it
try again and again: the work has to grow with the text's length and no faster, for texts come from
models, files and whoever sends requests.
"""

from __future__ import annotations

import ast
import importlib
import random
import re
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from backtracking import EXPONENT_MAX, STEPS_MAX, Matcher, growth

from mtmd.checkpoint.ollama_layout import _LAYOUTS
from mtmd.llm.tokenizer import pretokenizers
from mtmd.llm.tokenizer.control_tokens import _Spellings
from mtmd.options.adapters import _NAME

ROOT = Path(__file__).parents[1]
ROOMS = ("kernels", "clip", "llm", "mtmd", "web")
FUNCTIONS = (
    "compile",
    "match",
    "search",
    "fullmatch",
    "findall",
    "finditer",
    "split",
    "sub",
    "subn",
)
LIBRARIES = re.compile(r"\b(re|regex|re2|fnmatch)\b")
HOW = {"match": "match", "fullmatch": "fullmatch"}
UNUSED = [f"<unused{n}>" for n in range(6242)] + ["<bos>", "<start_of_turn>", "[multimodal]"]
# Those that are made while the program runs: (file, argument) -> examples of what is made there, or
# who writes them, where that is the one who runs the program.
MADE = {
    ("llm/tokenizer/control_tokens.py", "f'{_any((text[0] for text in spellings))}(?={_any((t[1] for t in spellings))})'"): [
        _Spellings(UNUSED, None)._begins.pattern,  # type: ignore[union-attr]
        _Spellings(["a" * 2000, "]]", "^-"], None)._begins.pattern,  # type: ignore[union-attr]
    ],
    ("mtmd/checkpoint/hub.py", "f'(?<![A-Za-z0-9]){re.escape(kind)}(?![A-Za-z0-9_])'"): [
        r"(?<![A-Za-z0-9])Q4_K_M(?![A-Za-z0-9_])",
        r"(?<![A-Za-z0-9])aaaaaaaa(?![A-Za-z0-9_])",
    ],
    ("kernels/gpu/compile.py", "f'\\\\.{name}:\\\\s*(\\\\d+)'"): [r"\.vgpr_count:\s*(\d+)"],
    ("mtmd/cluster/out/parts.py", "f'part-(\\\\d{{6,}}){re.escape(ending)}'"): [r"part-(\d{6,})\.jsonl"],
    ("kernels/checkpoint/canonical.py", "p"): "families, whose patterns are below",
    ("mtmd/inspect/dump.py", "text or ''"): "whoever runs `mtmd dump --match`",
    ("kernels/plan/scheduler.py", "expression"): "whoever runs --override-tensor",
    ("kernels/backends/limited.py", "pattern[1:-1]"): "whoever runs --refuse",
    ("mtmd/tools/lark.py", "'|'.join(map(re.escape, [*spellings, ID]))"): [
        r"<\|tool_call_start\|>|<\|im_end\|>|\[TOOL_CALLS\]",
    ],
    ("mtmd/tools/parser.py", "ID_PATTERN.join(parts)"): [
        r', "id": "[A-Za-z0-9]{9}"\}', r"\[CALL_ID\][A-Za-z0-9]{9}\[ARGS\]",
    ],
    ("mtmd/tools/probe.py", "re.escape(assign) + '([Tt]rue)' + re.escape(separator)"): ["=([Tt]rue), "],
    ("mtmd/tools/probe.py", "re.escape(assign) + '(None|null)'"): ["=(None|null)"],
    ("mtmd/tools/probe.py", "'\\\\{\\\\s*' + _KEYS[1]"): [r"\{\s*qbtwo"],
    ("mtmd/tools/probe.py", "f'\\\\{{\\\\s*\"{_KEYS[0]}\"\\\\s*:\\\\s*\"{_STRING}\"\\\\s*\\\\}}'"): [
        r'\{\s*"qaone"\s*:\s*"probedvalue"\s*\}',
    ],
    ("mtmd/prompt/bridge.py", "f\"({'|'.join(map(re.escape, markers))})\""): [
        r"(<\|vision_start\|><\|video_pad\|><\|vision_end\|>|<\|video_pad\|>|<\|image_pad\|>)",
    ],
    ("mtmd/checkpoint/ollama_layout.py", "pattern"): [
        pattern for layout in _LAYOUTS.values() for pattern, _ in layout.renamed
    ],
    ("mtmd/options/adapters.py", "_NAME"): [_NAME],
    ("clip/image/quiet.py", "_MODULES"): "a name, to find a filter by; nothing is matched",
}  # fmt: skip
ADVICE = (
    "Write it so that what is repeated without end cannot also be read by what follows it, and does "
    "not hold the character that the pattern begins with; or bound the repetition, or scan by hand"
)


@dataclass(frozen=True)
class Result:
    """A pattern as it stands in the source, and how it is looked for."""

    file: str
    name: str
    pattern: str
    flags: int = 0
    how: str = "search"

    def __str__(self) -> str:
        return f"{self.file}:{self.name}"


def sources() -> Iterator[tuple[str, ast.Module]]:
    """Of all files that have the name of a library of patterns: one in ten."""
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            text = path.read_text()
            if LIBRARIES.search(text):
                yield path.relative_to(ROOT).as_posix(), ast.parse(text)


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call, str]]:
    """(function of `re`, the call, the name that its result gets)."""
    names = {
        id(node.value): node.targets[0].id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of, function = node.func.value, node.func.attr
            if isinstance(of, ast.Name) and of.id == "re" and function in FUNCTIONS:
                yield function, node, names.get(id(node), "")


def ways(tree: ast.AST, name: str) -> set[str]:
    """The methods of a pattern that are called by its name."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == name
    }


def how_of(methods: set[str]) -> str:
    result = {HOW.get(method, "search") for method in methods} or {"search"}
    return result.pop() if len(result) == 1 else "search"


def flags_of(call: ast.Call) -> int:
    names = {n.attr for arg in call.args[1:] for n in ast.walk(arg) if isinstance(n, ast.Attribute)}
    return sum(int(getattr(re, n)) for n in names if isinstance(getattr(re, n, 0), re.RegexFlag))


def in_source() -> tuple[list[Result], set[tuple[str, str]]]:
    """All patterns, and (file, argument) of those made while the program runs."""
    result, made = [], set()
    for file, tree in sources():
        for function, call, name in calls(tree):
            how = how_of(ways(tree, name)) if function == "compile" else how_of({function})
            argument = call.args[0]
            if isinstance(argument, ast.Constant):
                label = name or f"line {call.lineno}"
                result.append(Result(file, label, argument.value, flags_of(call), how))
            elif name and any(_is_made_by(call, node) for node in tree.body):
                module = importlib.import_module(
                    "mtmd." + file[:-3].removeprefix("mtmd/").replace("/", ".")
                )
                compiled = getattr(module, name)
                result.append(Result(file, name, compiled.pattern, compiled.flags, how))
            else:
                made.add((file, ast.unparse(argument)))
    return result, made


def _is_made_by(call: ast.Call, node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and node.value is call


RESULT, DYNAMIC = in_source()


def check(match: Result) -> None:
    result = growth(match.pattern, match.flags & ~re.U, match.how)
    assert result.is_linear, (
        f"{match.file}, {match.name}: {match.pattern!r} takes {result.steps:.0f} steps for each "
        f"character (at most {STEPS_MAX}), growing with the power {result.exponent:.2f} of the "
        f"length (at most {EXPONENT_MAX}), over a text like {result.text!r}. {ADVICE}"
    )


@pytest.mark.parametrize("match", RESULT, ids=str)
def test_patterns_take_time_in_proportion_to_the_text(match: Result) -> None:
    check(match)


def test_patterns_made_at_run_time_are_known() -> None:
    """A new one needs a line in MADE: examples of it, which are tested here, or who writes it."""
    assert set(MADE) == DYNAMIC


@pytest.mark.parametrize(
    "match",
    [
        Result(file, f"example {n}", pattern)
        for (file, _), examples in MADE.items()
        if isinstance(examples, list)
        for n, pattern in enumerate(examples, 1)
    ],
    ids=str,
)
def test_patterns_made_at_run_time_too(match: Result) -> None:
    check(match)


def test_no_other_library_of_patterns_is_used() -> None:
    """`re` by its name, so that this test sees every use."""
    for file, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not any(a.name in ("regex", "fnmatch", "re2") for a in node.names), file
                assert not any(a.name == "re" and a.asname for a in node.names), file
            elif isinstance(node, ast.ImportFrom):
                assert node.module not in ("re", "regex", "fnmatch"), file


# The patterns by which prompts are cut into words are run by Oniguruma, which backtracks alike.
CLASSES = {
    "L": "a-zA-Zª日",
    "Lu": "A-ZÀ",
    "Lt": "ǅ",
    "Lm": "ʰ",
    "Lo": "ª日",
    "Han": "日",
    "Ll": "a-zé",
    "M": "\u0301",
    "N": "0-9²",
    "P": "!.,:;\"'()\\[\\]{}_\\-",
    "S": "+<>=|$",
}


def as_python(regex: str) -> str:
    """An Oniguruma pattern in Python's words, its Unicode classes by a few of their characters."""
    regex = re.sub(r"\\x\{([0-9A-Fa-f]+)\}", lambda m: re.escape(chr(int(m[1], 16))), regex)
    out, depth, at = "", 0, 0
    while at < len(regex):
        if match := re.compile(r"\\p\{(\w+)\}").match(regex, at):
            chars = CLASSES[match[1]]
            out += chars if depth else f"[{chars}]"
            at = match.end()
        elif regex[at] == "\\":
            out += regex[at : at + 2]
            at += 2
        else:
            depth += (regex[at] == "[") - (regex[at] == "]")
            out += regex[at]
            at += 1
    return out


def cuts() -> list[str]:
    """What `cut` is called with, of all families."""
    made: list[str] = []
    for family in pretokenizers.FAMILIES.values():
        for step in family.steps:
            cells = dict(zip(step.__code__.co_freevars, step.__closure__ or (), strict=True))
            if "regex" in cells:
                made.append(cells["regex"].cell_contents)
    return list(dict.fromkeys(made))


@pytest.mark.parametrize(
    "regex", [r for r in cuts() if r != pretokenizers.BETWEEN_MARKS], ids=lambda r: r[:24]
)
def test_prompts_are_cut_in_time_that_grows_with_them(regex: str) -> None:
    check(Result("llm/tokenizer/pretokenizers.py", regex[:40], as_python(regex)))


# The page's scripts.
REGEX_LITERAL = re.compile(r"/((?![*/])(?:[^\\/\n\[]|\\.|\[(?:[^\]\\\n]|\\.)*\])+)/[a-z]*")
BEFORE_LITERAL = "(=,:!&|?{;[>"  # after anything else, a slash divides


def in_scripts() -> list[Result]:
    result = []
    for path in sorted((ROOT / "web" / "static").rglob("*.js")):
        if "vendor" in path.parts:  # libraries, as they were published
            continue
        code = re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.M)
        assert "RegExp(" not in code, f"{path}: a pattern that this test cannot see"
        for slash in re.finditer("/", code):
            match = REGEX_LITERAL.match(code, slash.start())
            if match and code[: slash.start()].rstrip()[-1:] in BEFORE_LITERAL:
                name = path.relative_to(ROOT).as_posix()
                result.append(Result(name, match[1], from_script(match[1])))
    return result


def from_script(pattern: str) -> str:
    """A script's pattern as Python writes it; `\\w` stands for any Unicode property."""
    pattern = pattern.replace(r"\/", "/").replace("[[", r"[\[")
    pattern = re.sub(r"\\p\{[^}]*\}", r"\\w", pattern)
    return re.sub(r"\\u\{([0-9a-f]+)\}", lambda m: f"\\U{int(m[1], 16):08x}", pattern)


def test_the_scripts_patterns_are_found() -> None:
    assert {"[.!?]$", 'filename="([^"]+)"'} <= {result.pattern for result in in_scripts()}


@pytest.mark.parametrize("match", in_scripts(), ids=str)
def test_the_pages_patterns_are_linear(match: Result) -> None:
    check(match)


# What the test itself sees and does not mistake.
@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(a|aa)+$",
        r"\s*x",
        r"\s+$",
        r"^\s+|\s+$",
        r"a.*b",
        r"<x[^>]*>",
        r".*?,.*?,.*?;",
        r"(\d+,?)+;",
        r'(\w+)="([^"]*)"',
        r"\n\s*1 \| ",
        r"\)\s*,?\s*\(",
        r"(?:<ref>([^<]*)<[^>]*>\s*)?<box>\s*([^<]*?)\s*</box>",
    ],
)
def test_patterns_that_are_not_linear_are_seen(pattern: str) -> None:
    assert not growth(pattern).is_linear


def test_many_alternatives_at_each_place_are_seen() -> None:
    """As thousands of control tokens were looked for: linear in the text, and yet too slow."""
    matcher = Matcher("(?=" + "|".join(map(re.escape, [*UNUSED[:200], "[multimodal]"])) + ").")
    assert matcher.steps("<u" * 50, "search") > STEPS_MAX * 100


@pytest.mark.parametrize(
    "pattern", [r"abc", r"<[^<>]*>", r"(?<!\s)\s+$", r"[.!?]$", r"<[^<>\s]{1,40}>", r'x="([^"]+)"']
)
def test_linear_patterns_pass(pattern: str) -> None:
    assert growth(pattern).is_linear


def test_the_counting_matcher_matches_as_python_does() -> None:
    rng = random.Random(7)
    for result in RESULT:
        matcher = Matcher(result.pattern, result.flags & ~re.U)
        compiled = re.compile(result.pattern, result.flags)
        for _ in range(20):
            text = matcher._sample(list(matcher.tree), rng)
            text = "".join(rng.choice((c, c, c, "", rng.choice(string.printable))) for c in text)
            matcher._left = sys.maxsize
            ends = [matcher._first(text, at, False) for at in range(len(text) + 1)]
            subject = text.encode("latin-1") if isinstance(result.pattern, bytes) else text
            assert ends == [
                m.end() if (m := compiled.match(subject, at)) else None
                for at in range(len(text) + 1)
            ], (result.pattern, text)
