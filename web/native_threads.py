"""Threads of the system where gevent has made threads greenlets: what takes the processor for long
runs there, so that other connections are answered meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextvars import copy_context
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from gevent.monkey import is_module_patched
from gevent.threadpool import ThreadPool

from mtmd.base.turns import Turns

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

COMPUTING = 2  # threads that compute in Python: there is one interpreter
Result = TypeVar("Result")
_turns = Turns(COMPUTING, each=1)
_END = object()


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
        result: Result = _computing().apply(copy_context().run, (function, *arguments))
        return result


@cache
def _computing() -> ThreadPool:
    return ThreadPool(COMPUTING)


def in_threads(app: WSGIApplication, pool: ThreadPool) -> WSGIApplication:
    """Return `app`, called in threads of `pool`: for a process whose locks and sockets do not let
    other greenlets run.
    """

    def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        return _Body(pool, pool.apply(app, (environ, start_response)))

    return call


class _Body:
    """The pieces of a response. It waits for one that is being made before it is closed."""

    def __init__(self, pool: ThreadPool, body: Iterable[bytes]) -> None:
        self._pool, self._body, self._pieces = pool, body, iter(body)
        self._next: Any = None

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        self._next = self._pool.spawn(next, self._pieces, _END)
        piece = self._next.get()
        if piece is _END:
            raise StopIteration
        return bytes(piece)

    def close(self) -> None:
        if self._next is not None:
            self._next.wait()
        if hasattr(self._body, "close"):
            self._pool.apply(self._body.close)
