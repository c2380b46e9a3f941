"""Threads of the system where gevent has made threads greenlets: what takes the processor for long,
or waits for the disk, runs there, so that other connections are answered meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from functools import cache
from threading import Event
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gevent import get_hub
from gevent.monkey import is_module_patched
from gevent.threadpool import ThreadPool

from mtmd.base.turns import Turns

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

COMPUTING = 2  # threads that compute in Python: there is one interpreter
Result = TypeVar("Result")
_turns = Turns(COMPUTING, each=1)


def is_patched() -> bool:
    """Return whether threads are greenlets in this process."""
    return bool(is_module_patched("threading"))


def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """Return what `function` returns. In a process that gevent has patched it runs in a native
    thread, with the context of the caller; callers take turns by the client they work for. It must
    not wait for other greenlets.
    """
    if not is_patched():
        return function(*arguments)
    with _turns.one():
        context = copy_context()
        return _apply(_computing(), lambda: context.run(function, *arguments))


def waiting(function: Callable[..., Result], *arguments: Any) -> Result:
    """Do what `in_thread` does, for what waits for the disk and computes little: any number of
    callers, up to gevent's own of threads.
    """
    if not is_patched():
        return function(*arguments)
    return _apply(get_hub().threadpool, function, *arguments)


def _apply(pool: ThreadPool, function: Callable[..., Result], *arguments: Any) -> Result:
    """Raises what `function` raises, which gevent would write to stderr as well."""

    def outcome() -> tuple[Result | None, BaseException | None]:
        try:
            return function(*arguments), None
        except BaseException as error:
            return None, error

    result, error = pool.apply(outcome)
    try:
        if error is not None:
            raise error
        return cast("Result", result)
    finally:
        del error  # whose traceback has this frame


@cache
def _computing() -> ThreadPool:
    return ThreadPool(COMPUTING)


def in_threads(app: WSGIApplication, pool: ThreadPool) -> WSGIApplication:
    """Return `app`, called in threads of `pool`: for a process whose locks and sockets do not let
    other greenlets run.
    """

    def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return _Body(pool, _apply(pool, app, environ, start_response))

    return call


class _Body:
    """The pieces of a response. It waits for one that is being made before it is closed."""

    def __init__(self, pool: ThreadPool, body: Iterable[bytes]) -> None:
        self._pool, self._body, self._pieces = pool, body, iter(body)
        self._made = Event()
        self._made.set()

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self._made.clear()
        piece = _apply(self._pool, self._make)
        if piece is None:
            raise StopIteration
        return piece

    def _make(self) -> bytes | None:
        try:
            return next(self._pieces, None)
        finally:
            self._made.set()

    def close(self) -> None:
        _apply(self._pool, self._close)

    def _close(self) -> None:
        self._made.wait()
        if hasattr(self._body, "close"):
            self._body.close()
