"""What clients leave for later, in a file."""

from __future__ import annotations

import errno
import random
from types import SimpleNamespace

import pytest

from mtmd.web.errors import ApiError
from mtmd.web.intake import spool as module
from mtmd.web.intake.spool import Spool
from mtmd.web.intake.uploads import Uploads


def test_each_is_read_as_it_was_written_however_places_change_hands():
    spool, chance, kept = Spool(), random.Random(1), {}
    for number in range(400):
        if kept and chance.random() < 0.45:
            piece = chance.choice(list(kept))
            spool.let_go(piece)
            del kept[piece]
            assert spool.read(piece) is None
        data = chance.randbytes(chance.choice((0, 1, 7, 100, 4096)))
        kept[spool.write(data)] = data
        if number % 20 == 0:
            assert all(spool.read(piece) == data for piece, data in kept.items())
        starts = [start for start, _ in spool._free]
        assert starts == sorted(starts)
    for piece in list(kept):
        spool.let_go(piece)
        spool.let_go(piece)  # once is enough
    assert (spool._free, spool._end) == ([], 0)


def test_a_place_that_is_let_go_is_used_again():
    spool = Spool()
    pieces = [spool.write(bytes(100)) for _ in range(3)]
    spool.let_go(pieces[1])
    assert [spool.write(bytes(60)).start, spool.write(bytes(60)).start] == [100, 300]
    assert spool.write(bytes(40)).start == 160


def test_a_full_disk_is_told_and_takes_no_room(monkeypatch):
    class Full:
        def seek(self, _):
            pass

        def write(self, _):
            raise OSError(errno.ENOSPC, "No space left on device")

        def truncate(self, _):
            pass

        def close(self):
            pass

    full = SimpleNamespace(TemporaryFile=lambda **_: Full())
    monkeypatch.setattr(module, "tempfile", full)
    uploads = Uploads(1 << 20)
    with pytest.raises(ApiError, match="No space left") as told:
        uploads.add("anna", "a.png", "vision", b"1234")
    assert (told.value.status, told.value.code) == (507, "storage_full")
    assert uploads.all_of("anna") == [] and uploads._spool._end == 0


def test_a_file_that_is_deleted_while_somebody_reads_it_is_not_another():
    uploads = Uploads(1 << 20)
    mine = uploads.add("anna", "a.png", "vision", b"mine")
    found = uploads.get("anna", mine.id)
    uploads.delete("anna", mine.id)
    uploads.add("ben", "b.png", "vision", b"ours")
    with pytest.raises(ApiError, match="no file of this id"):
        uploads.read(found)
