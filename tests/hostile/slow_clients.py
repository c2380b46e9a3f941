"""Clients of four kinds that keep connections and give nothing for them: a head that comes a byte
now and then, a body that does, an answer that nobody reads, and nothing at all.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections import Counter

from attack import Account, status_of
from attempts import Attempt, chat, post, request

KINDS = ("slow head", "slow body", "unread answer", "idle")
BYTE_S = 5.0  # between bytes of those that are slow
END_S = 200.0  # until a connection that nobody uses has to be closed, on a busy machine too


def attack_slowly(
    where: tuple[str, int], key: str, seed: int, *, count: int, seconds: float, to_the_end: bool
) -> Account:
    """Keeps `count` connections open for `seconds`, each made anew when the server has ended it.
    `to_the_end`: then waits until the server has ended each of them; else closes them.
    """
    account = Account()
    asyncio.run(_crowd(where, key, seed, count, seconds, to_the_end, account))
    return account


async def _crowd(
    where: tuple[str, int],
    key: str,
    seed: int,
    count: int,
    seconds: float,
    to_the_end: bool,
    account: Account,
) -> None:
    end = time.monotonic() + seconds
    opened = Counter[str]()

    async def client(index: int) -> None:
        kind = KINDS[index % len(KINDS)]
        rng = random.Random(f"slow {seed} {index}")
        await asyncio.sleep(rng.uniform(0, min(2.0, seconds / 2)))
        while time.monotonic() < end:
            opened[kind] += 1
            start = time.monotonic()
            status, data = await _slow(where, kind, rng, key, end, to_the_end)
            taken = time.monotonic() - start
            account.add(
                Attempt(kind, b"", whole=False), f"slow {seed} {index}", status, taken, data
            )
            await asyncio.sleep(0.2 if status in ("429", "503", "refused") else 0)

    await asyncio.gather(*(client(index) for index in range(count)))


async def _slow(
    where: tuple[str, int], kind: str, rng: random.Random, key: str, end: float, to_the_end: bool
) -> tuple[str, bytes]:
    loop = asyncio.get_running_loop()
    sock = socket.socket()
    sock.setblocking(False)
    if kind == "unread answer":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    try:
        try:
            await asyncio.wait_for(loop.sock_connect(sock, where), 60)
        except (OSError, TimeoutError, asyncio.TimeoutError):
            return "refused", b""
        at_once, later = _words(kind, rng, key)
        try:
            await loop.sock_sendall(sock, at_once)
            if kind == "unread answer":
                return await _unread(sock, end)
            received, closed_by = bytearray(), end + (END_S if to_the_end else 0.0)
            while time.monotonic() < closed_by:
                try:
                    piece = await asyncio.wait_for(loop.sock_recv(sock, 4096), BYTE_S)
                except (TimeoutError, asyncio.TimeoutError):
                    if time.monotonic() < end and later:
                        await loop.sock_sendall(sock, bytes([rng.choice(later)]))
                    continue
                if not piece:
                    return status_of(received), bytes(received)
                received += piece
        except OSError:
            return "closed", b""
        return ("unanswered" if to_the_end else "left"), bytes(received)
    finally:
        sock.close()


def _words(kind: str, rng: random.Random, key: str) -> tuple[bytes, bytes]:
    """What is sent at once, and bytes of which one is sent now and then."""
    whole = post("/v1/chat/completions", chat("hi"), key if rng.random() < 0.5 else "")
    if kind == "slow head":
        return whole[: rng.randrange(1, whole.index(b"\r\n\r\n"))], b"abc"
    if kind == "slow body":
        body = json.dumps(chat("hi")).encode()
        size = {"Content-Length": str(rng.choice((1000, 60_000, 4_000_000)))}
        return request("POST", "/v1/chat/completions", body, key=key, headers=size), b" "
    if kind == "unread answer":
        if rng.random() < 0.3:
            return request("GET", "/openapi.json", key=key) * 4, b""
        body = chat("go on", stream=True, max_tokens=2000, ignore_eos=True)
        return post("/v1/chat/completions", body, key), b""
    return b"", b""


async def _unread(sock: socket.socket, end: float) -> tuple[str, bytes]:
    """Reads nothing for a while, then what there is."""
    loop = asyncio.get_running_loop()
    await asyncio.sleep(max(0.0, min(30.0, end - time.monotonic())))
    try:
        data = await asyncio.wait_for(loop.sock_recv(sock, 4096), 1.0)
    except (TimeoutError, asyncio.TimeoutError):
        return "left", b""
    return status_of(data), data if status_of(data) != "200" else b""
