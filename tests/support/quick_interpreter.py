"""Triton's interpreter (triton 3.9) without two things that it does over and over, half of a
launch's time: each call of a function inside a kernel patches the language, which the launch has
done; each value's type is looked up in a table that is made for it. What it computes is its own
affair, as before.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    patch, dtype_of = interpreter._patch_lang, interpreter._get_np_dtype
    languages: dict[int, list[Any]] = {}  # by the globals of a function, which its module keeps
    dtypes: dict[str, Any] = {}

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """InterpretedFunction.__call__, which patches only what is not patched."""
        names = self.fn.__globals__
        if id(names) not in languages:
            modules = filter(inspect.ismodule, list(names.values()))
            languages[id(names)] = [m for m in modules if m in (tl, tl.core)]
        if any(tl.core.is_builtin(language.load) for language in languages[id(names)]):
            patch(self.fn)
        function = self.rewrite()
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    def dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = dtype_of(kind)
        return dtypes[name]

    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (interpreter.InterpretedFunction, "__call__", call),
        (interpreter, "_get_np_dtype", dtype),
    )
    for owner, name, new in replaced:
        monkeypatch.setattr(owner, name, new)
