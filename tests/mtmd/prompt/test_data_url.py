"""Base64 is decoded piece by piece, so that nobody waits for a large picture's."""

from __future__ import annotations

import base64
import random
from unittest.mock import patch

import pytest

from mtmd.prompt import data_url
from mtmd.prompt.data_url import PIECE, decoded


@pytest.mark.parametrize("count", [0, 1, 2, PIECE * 3 // 4 - 1, PIECE * 3 // 4, PIECE + 1])
def test_it_is_what_was_written(count: int) -> None:
    data = random.Random(count).randbytes(count)
    assert decoded(base64.b64encode(data).decode()) == data
    assert decoded(base64.encodebytes(data).decode()) == data


@pytest.mark.parametrize("count", [1, 2, 3, 100, PIECE])
def test_other_ways_to_write_it(count: int) -> None:
    """The alphabet of URLs, no padding, and what a URL escapes."""
    data = random.Random(count).randbytes(count)
    plain, for_urls = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    escaped = plain.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    for text in (plain.rstrip("="), for_urls, for_urls.rstrip("="), escaped):
        assert decoded(text) == data


@pytest.mark.parametrize(
    "wrong",
    [
        "%C3%A9AAAA",
        "AAA%",
        "AA%2",
        "%25%25%25%25",
        *["A", "AA=A", "AA==AA==", "é" * 8, "A" * PIECE + "A", "A" * (PIECE - 2) + "==AAAA"],
    ],
)
def test_what_is_no_base64_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="not base64"):
        decoded(wrong)


@pytest.mark.parametrize("piece", [1, 2, 3, 4, 5, 8, PIECE])
def test_where_pieces_end_changes_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_url, "PIECE", piece)
    for end, data in {"": b"", "=": b"", "==": b"", "AA==": b"\0", "AAA=": b"\0\0"}.items():
        assert decoded("A" * 8 + end) == bytes(6) + data  # some write padding where none is needed
    for wrong in ("===", "====", "AA=", "AA===", "AA==BB==", "=AAA", "A=", "A=="):
        with pytest.raises(ValueError, match="not base64"):
            decoded("A" * 8 + wrong)


def test_no_piece_is_long() -> None:
    with patch.object(data_url.base64, "b64decode", wraps=base64.b64decode) as calls:
        decoded("A" * (3 * PIECE + 4))
    assert [len(call.args[0]) for call in calls.call_args_list] == [PIECE] * 3 + [4]
