"""Triton's interpreter (triton 3.9) without what it does over and over, most of a launch's time: each
call of a function inside a kernel patches the language, which the launch has done, and each launch
looks through the whole language for what is to be patched; each value's type is looked up in a
table that is made for it; its shape is checked, wrapped and written out, though there are few. What
it computes is its own affair, as before.
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
    builtins: dict[Any, list[tuple[str, Any]]] = {}  # by module or class, as they are unpatched
    types: dict[tuple[int, ...], tuple[Any, int, str]] = {}  # by shape
    tensors: dict[tuple[int, ...], tuple[Any, Any]] = {}
    init_type, init_tensor = tl.core.block_type.__init__, tl.core.tensor.__init__

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

    def patch_builtins(owner: Any, _: Any, scope: Any) -> None:
        """_patch_builtin, and _patch_attr of each."""
        if owner not in builtins:
            members = inspect.getmembers(owner)
            builtins[owner] = [(name, m) for name, m in members if tl.core.is_builtin(m)]
        for name, member in builtins[owner]:
            scope.set_attr(owner, name, with_semantic(member))

    def with_semantic(member: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        return run

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        values = shape.values if isinstance(shape, tl.core.tuple) else shape
        sizes = tuple(s.value if isinstance(s, tl.core.constexpr) else s for s in values)
        if sizes not in types:
            init_type(self, element_ty, shape)
            types[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = types[sizes]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in tensors:
            init_tensor(self, handle, type)
            tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = tensors[sizes]

    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (interpreter.InterpretedFunction, "__call__", call),
        (interpreter, "_get_np_dtype", dtype),
        (interpreter, "_patch_builtin", patch_builtins),
        (tl.core.block_type, "__init__", block_type),
        (tl.core.tensor, "__init__", tensor),
    )
    for owner, name, new in replaced:
        monkeypatch.setattr(owner, name, new)
