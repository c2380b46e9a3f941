"""jinja2 for templates from the internet.

A chat template is a program. jinja2's sandbox keeps it away from Python's internals; what the
sandbox leaves open, using up memory and time, is closed here: every value a template makes is
weighed, and every loop, call and filter is metered.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

from jinja2 import Template, meta, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.filters import do_indent
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from mtmd.base.errors import ModelError, MtmdError, PromptError
from mtmd.base.text import one_line
from mtmd.chat_template.render_limits import Meter

TEMPLATE_CHARS_MAX = 256 << 10  # the longest in use have about 30 thousand
COMPILED = 16  # templates kept for checkpoints that have the same, or are opened again
CAUSE_CHARS = 300  # of a message of jinja2, or of a template
RENDERED_CHARS_MAX = 16 << 20  # several times the longest context of any model

# Filters whose result is at most about as large as what goes in; format, indent, join, replace and
# tojson are written anew below.
FILTERS = [
    "abs",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "int",
    "items",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "reverse",
    "safe",
    "select",
    "selectattr",
    "sort",
    "string",
    "title",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
]

_METER = " meter"  # with a blank, so that no template can name it
_EACH, _HOLD, _CONCAT = " each", " hold", " concat"


class SafeTemplate:
    """A compiled template, rendered within limits. It may be used from several threads."""

    def __init__(self, source: str, name: str) -> None:
        """`name` is used in errors. Raises ModelError for a template that is too long or does not
        compile.
        """
        self._source = source
        # Whoever sends messages need not know where the file lies.
        self._shown = re.split(r"[/\\]", name)[-1]
        if len(source) > TEMPLATE_CHARS_MAX:
            raise ModelError(
                f"{name} has {len(source)} characters; expected a chat template of at most "
                f"{TEMPLATE_CHARS_MAX}"
            )
        try:
            self._template = _compiled(source)
        # besides syntax errors the compiler runs out of stack or memory on purposely deep ones
        except Exception as error:
            raise ModelError(f"{name} is not a usable chat template: {_cause(error)}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. `variables` hold JSON types.

        Raises PromptError where the template refuses or cannot use the variables, or they are too
        long for it; ModelError where it goes beyond a limit by itself.
        """
        meter = Meter(self._shown, _characters(variables))
        try:
            return self._collect({**variables, _METER: meter}, meter)
        except MtmdError:
            raise
        except SecurityError as error:
            meter.refuse(f"what chat templates may not have ({_cause(error)})", error)
        except (RecursionError, MemoryError, OverflowError) as error:
            meter.exceed(f"too much ({type(error).__name__}: {_cause(error)})", error)
        except Exception as error:
            raise PromptError(
                f"{self._shown} cannot render these messages: {type(error).__name__}: "
                f"{_cause(error)}"
            ) from error

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that it reads and does not set before."""
        return _variables(self._source)

    def _collect(self, variables: dict[str, Any], meter: Meter) -> str:
        parts, size = [], 0
        for part in self._template.generate(variables):
            size += len(part)
            if size > RENDERED_CHARS_MAX:
                meter.exceed(f"a prompt of more than {RENDERED_CHARS_MAX} characters")
            parts.append(part)
        return "".join(parts)


class _Metering(NodeTransformer):
    """Puts the meter into a template: around what loops run over, and around new lists and joined
    strings.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        if node.recursive:  # its calls would go round the meter
            raise TemplateSyntaxError("recursive loops are not supported", node.lineno)
        node.iter = _apply(_EACH, node.iter, _literal_chars(node))
        return node

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the targets of an assignment
            return node
        try:
            node.as_const()
        except (
            Exception
        ):  # Impossible: not a constant; or one that fails, which is said when it is rendered
            return _apply(_HOLD, node)
        return node

    visit_Tuple = visit_Dict = visit_List

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _apply(_CONCAT, nodes.List(node.nodes))


def _apply(name: str, value: nodes.Node, *args: int) -> nodes.Filter:
    return nodes.Filter(value, name, [nodes.Const(arg) for arg in args], [], None, None)


def _literal_chars(node: nodes.Node) -> int:
    """The literal text one pass through `node` can write, plus one."""
    return 1 + sum(len(data.data) for data in node.find_all(nodes.TemplateData))


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is rendered as it
    is.
    """

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Namespace(Namespace):
    """Namespaces can refer to each other; printing their insides would not end."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates (transformers/utils/chat_template_utils.py),
    metered.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
            finalize=_hold,
        )
        self.filters = {name: _metered(name) for name in FILTERS}
        self.filters.update(
            {
                "format": _format,
                "indent": _indent,
                "join": _join,
                "replace": _replace,
                "tojson": _to_json,
            }
        )
        self.filters.update({_EACH: _each, _HOLD: _hold, _CONCAT: _concat})
        self.globals = {
            "range": self.globals["range"],
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Metering().visit(super()._parse(source, name, filename))
        return tree.set_environment(self)  # type: ignore[no-any-return]

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        meter = _meter(context)
        meter.check_binop(operator, left, right)
        return meter.hold(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call as the base class does, where the underscores keep the template's keyword arguments
        apart from these.
        """
        meter = _meter(__context)
        method = getattr(__obj, "__wrapped__", __obj)  # the base class wraps str.format
        owner = getattr(method, "__self__", None)
        if isinstance(owner, (str, bytes, int, float, list, tuple, dict)):
            args = meter.check_method(method.__name__, owner, args, kwargs)
        meter.charge(1)
        return meter.hold(super().call(__context, __obj, *args, **kwargs))


@lru_cache(maxsize=COMPILED)
def _compiled(source: str) -> Template:
    """The compiled template, which nothing that it renders changes."""
    return _Sandbox().from_string(source)


@lru_cache(maxsize=COMPILED)
def _variables(source: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_Sandbox().parse(source)))


# Runs jinja2's own filters; sandboxed too, since some of them read attributes.
_PLAIN = ImmutableSandboxedEnvironment()


def _meter(context: Context) -> Meter:
    meter: Meter = context.parent[_METER]
    return meter


def _metered(name: str) -> Callable[..., Any]:
    """A filter of jinja2 with its input and its result weighed."""

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _meter(context)
        if isinstance(value, Iterator):  # the lazy results of map, select and so on
            value = list(meter.each(value, 1))
        meter.hold(value)
        return meter.hold(
            _PLAIN.call_filter(
                name, value, args, kwargs, context=context, eval_ctx=context.eval_ctx
            )
        )

    return run


@pass_context
def _each(context: Context, items: Iterable[Any], weight: int) -> Iterator[Any]:
    return _meter(context).each(items, weight)


@pass_context
def _hold(context: Context, value: Any) -> Any:
    return _meter(context).hold(value)


@pass_context
def _concat(context: Context, parts: list[Any]) -> str:
    meter = _meter(context)
    meter.hold(parts)
    return str(meter.hold("".join(map(str, parts))))


@pass_context
def _join(
    context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    meter = _meter(context)
    if attribute is not None:
        value = _PLAIN.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    parts = list(meter.each(value, 1))
    meter.hold(parts)
    meter.check(len(parts) * len(str(d)))
    return str(meter.hold(str(d).join(map(str, parts))))


@pass_context
def _replace(context: Context, value: Any, old: str, new: str, count: int | None = None) -> str:
    meter = _meter(context)
    text, old, new = (str(meter.hold(item)) for item in (value, old, new))
    meter.check_replace(text, old, new)
    return str(meter.hold(text.replace(old, new, -1 if count is None else count)))


@pass_context
def _indent(
    context: Context, value: str, width: int | str = 4, first: bool = False, blank: bool = False
) -> str:
    meter = _meter(context)
    meter.check((value.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return str(meter.hold(do_indent(value, width, first, blank)))


@pass_context
def _format(context: Context, value: str, *args: Any, **kwargs: Any) -> Any:
    meter = _meter(context)
    meter.check_format(str(value), "%", [*args, kwargs])
    return meter.hold(str(value) % (kwargs or args))


@pass_context
def _to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as json.dumps writes it, without jinja2's escaping of HTML, part by part so that it can
    be stopped.
    """
    meter = _meter(context)
    meter.hold([value, separators])
    if indent is not None:  # a line is indented by it once per level
        meter.check(sys.getrecursionlimit() * (indent if isinstance(indent, int) else len(indent)))
    parts, size = [], 0
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    for part in encoder.iterencode(value):
        size += len(part)
        meter.check(size)
        parts.append(part)
    return str(meter.hold("".join(parts)))


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _characters(variables: Mapping[str, Any]) -> int:
    """Return the characters of all texts."""
    count, stack = 0, list(variables.values())
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            count += len(value)
        elif isinstance(value, (list, tuple)):
            stack.extend(value)
        elif isinstance(value, dict):
            stack.extend(value.values())
    return count


def _raise_exception(message: object) -> NoReturn:
    raise PromptError(f"the chat template refuses these messages: {_cause(message)}")


def _strftime_now(layout: str) -> str:
    if len(layout) > 200 or re.search(r"\d{3}", layout):
        raise SecurityError(f"strftime_now({layout!r:.60}): expected a short date format")
    return datetime.now().strftime(layout)


def _cause(message: object) -> str:
    return one_line(message, CAUSE_CHARS)
