"""What clients leave for later, in a file."""

from __future__ import annotations

import errno
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from mtmd.web.errors import ApiError
from mtmd.web.intake import spool as module
from mtmd.web.intake.spool import BLOCK, Spool
from mtmd.web.intake.uploads import LIFETIME_S, RECORD_BYTES, Uploads


def test_each_is_read_as_it_was_written_however_places_change_hands():
    spool, chance, saved = Spool(), random.Random(1), {}
    for number in range(400):
        if saved and chance.random() < 0.45:
            piece = chance.choice(list(saved))
            spool.let_go(piece)
            del saved[piece]
            assert spool.read(piece) is None
        data = chance.randbytes(chance.choice((0, 1, 7, 100, 4096, 4097, 12_288)))
        saved[spool.write(data)] = data
        if number % 20 == 0:
            assert all(spool.read(piece) == data for piece, data in saved.items())
        starts = [start for start, _ in spool._free]
        assert starts == sorted(starts)
    for piece in list(saved):
        spool.let_go(piece)
        spool.let_go(piece)  # once is enough
    assert (spool._free, spool._end) == ([], 0)


def test_a_place_that_is_let_go_is_used_again_also_for_something_larger():
    spool = Spool()
    pieces = [spool.write(bytes(BLOCK)) for _ in range(5)]
    for piece in pieces[1::2]:
        spool.let_go(piece)
    data = bytes(range(200)) * (3 * BLOCK // 200)
    assert spool.read(large := spool.write(data)) == data
    assert large.locations == [(BLOCK * n, BLOCK * (n + 1)) for n in (1, 3, 5)]
    spool.let_go(pieces[0])
    assert [spool.write(b"x").locations for _ in range(2)] == [
        [(0, BLOCK)],
        [(6 * BLOCK, 7 * BLOCK)],
    ]


def test_the_file_is_no_larger_than_what_was_in_it_at_one_time():
    """Though pieces grow, and those that stay lie between them."""
    spool, maximum, saved = Spool(), 64 * BLOCK, []
    for size in (1, 2, 4, 8, 16):
        while sum(piece.size for piece in saved) + size * BLOCK <= maximum:
            saved.append(spool.write(bytes(size * BLOCK)))
        assert spool._end <= maximum
        for piece in saved[::2]:
            spool.let_go(piece)
        saved = saved[1::2]


def test_a_full_disk_is_told_and_takes_no_room(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    uploads = Uploads(1 << 20)
    with pytest.raises(ApiError, match="No space left") as reported:
        uploads.add("anna", "a.png", "vision", b"1234")
    assert (reported.value.status, reported.value.code) == (507, "storage_full")
    assert uploads.all_of("anna") == [] and uploads._spool._end == 0


def test_what_is_said_of_a_disk_names_no_folder(monkeypatch):
    def nowhere(**_):
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/secret']")

    monkeypatch.setattr(module, "tempfile", SimpleNamespace(TemporaryFile=nowhere))
    with pytest.raises(ApiError, match="No such file") as reported:
        Uploads(1 << 20).add("anna", "a.png", "vision", b"1234")
    assert "secret" not in reported.value.message


def test_letting_go_beside_many_holes_takes_no_more_steps():
    def steps(holes):
        spool, lines = Spool(), 0
        pieces = [spool.write(b"x") for _ in range(2 * holes)]
        for piece in pieces[::2]:
            spool.let_go(piece)

        def count(_frame, event, _):
            nonlocal lines
            lines += event == "line"
            return count

        before = sys.gettrace()
        sys.settrace(count)
        try:
            spool.let_go(pieces[holes | 1])
        finally:
            sys.settrace(before)
        assert len(spool._free) == holes - 1
        return lines

    assert 0 < steps(200) == steps(4)


def test_a_file_that_is_deleted_while_somebody_reads_it_is_not_another():
    uploads = Uploads(1 << 20)
    mine = uploads.add("anna", "a.png", "vision", b"mine")
    result = uploads.get("anna", mine.id)
    uploads.delete("anna", mine.id)
    uploads.add("ben", "b.png", "vision", b"ours")
    with pytest.raises(ApiError, match="no file of this id"):
        uploads.read(result)


@contextmanager
def slow(monkeypatch, name):
    """Meanwhile who reads or writes long ones waits: whether they have begun, and what lets go."""
    begun, let_go, work = threading.Event(), threading.Event(), getattr(os, name)

    def waits(number, what, at):
        if (what if isinstance(what, int) else len(what)) > BLOCK:
            begun.set()
            assert let_go.wait(20)
        return work(number, what, at)

    monkeypatch.setattr(os, name, waits)
    with ThreadPoolExecutor(1) as thread:
        try:
            yield thread, begun, let_go
        finally:
            let_go.set()


LONG, SHORT = bytes(range(200)) * 100, b"short"


def test_others_read_and_write_while_one_is_written(monkeypatch):
    spool = Spool()
    first = spool.write(SHORT)
    with slow(monkeypatch, "pwrite") as (thread, begun, let_go):
        long = thread.submit(spool.write, LONG)
        assert begun.wait(20)
        assert spool.read(first) == SHORT
        second = spool.write(SHORT[::-1])
        spool.let_go(first)
        third = spool.write(b"third")
        let_go.set()
        assert spool.read(long.result(20)) == LONG
    assert (spool.read(second), spool.read(third)) == (SHORT[::-1], b"third")


def test_what_is_let_go_while_it_is_read_is_not_there(monkeypatch):
    """Its places are another's by then, or cut off."""
    spool = Spool()
    long = spool.write(LONG)
    with slow(monkeypatch, "pread") as (thread, begun, let_go):
        read = thread.submit(spool.read, long)
        assert begun.wait(20)
        spool.let_go(long)
        other = spool.write(SHORT)
        assert spool.read(other) == SHORT
        let_go.set()
        assert read.result(20) is None


def test_what_is_being_written_counts_in_its_owners_room(monkeypatch):
    uploads = Uploads(3 * len(LONG) // 2 + 2 * RECORD_BYTES)
    with slow(monkeypatch, "pwrite") as (thread, begun, let_go):
        first = thread.submit(uploads.add, "anna", "a.png", "vision", LONG)
        assert begun.wait(20)
        end = uploads._spool._end
        with pytest.raises(ApiError, match="are more than") as reported:
            uploads.add("anna", "b.png", "vision", LONG)
        assert reported.value.status == 413 and uploads._spool._end == end  # the disk was not asked
        assert uploads.add("ben", "b.png", "vision", SHORT).size == len(SHORT)
        let_go.set()
        upload = first.result(20)
        assert uploads.all_of("anna") == [upload]
    with pytest.raises(ApiError, match="are more than"):
        uploads.add("anna", "b.png", "vision", LONG)
    assert uploads.add("anna", "c.png", "vision", SHORT).size == len(SHORT)
    uploads.delete("anna", upload.id)
    assert uploads.add("anna", "b.png", "vision", LONG).size == len(LONG)
    assert not uploads._coming


def test_what_could_not_be_written_takes_no_room(monkeypatch):
    uploads = Uploads(len(LONG) + RECORD_BYTES)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "")))
        with pytest.raises(ApiError, match="could not be written"):
            uploads.add("anna", "a.png", "vision", LONG)
    assert uploads.add("anna", "a.png", "vision", LONG).size == len(LONG)


def test_another_upload_costs_the_same_beside_many():
    def steps(count):
        uploads, lines = Uploads(1 << 30), 0
        for _ in range(count):
            uploads.add("anna", "a.png", "vision", b"1")

        def look(_frame, event, _):
            nonlocal lines
            lines += event == "line"
            return look

        before = sys.gettrace()
        sys.settrace(look)
        try:
            uploads.add("anna", "a.png", "vision", b"1")
        finally:
            sys.settrace(before)
        return lines

    assert 0 < steps(500) == steps(5)


def test_room_is_counted_through_uses_deletions_and_ends():
    now = [0.0]
    uploads = Uploads(4 * (1 + RECORD_BYTES), clock=lambda: now[0], owners=lambda: 2)

    def add(owner):
        now[0] += 1
        return uploads.add(owner, "a.png", "vision", b"1").id

    first, second = add("anna"), add("anna")
    add("ben")
    with pytest.raises(ApiError, match="more than"):
        add("anna")
    uploads.delete("anna", second)
    with pytest.raises(ApiError):
        uploads.delete("anna", second)
    third = add("anna")
    now[0] += LIFETIME_S - 10
    uploads.get("anna", first)  # lives on
    now[0] += 20
    assert [f.id for f in uploads.all_of("anna")] == [first] and not uploads.all_of("ben")
    fourth = add("anna")
    assert [f.id for f in uploads.all_of("anna")] == [first, fourth]  # as they came
    with pytest.raises(ApiError, match="no file"):
        uploads.get("anna", third)
    with pytest.raises(ApiError, match="more than"):
        add("anna")
    now[0] += 2 * LIFETIME_S
    assert not uploads.all_of("anna") and not uploads._stored
