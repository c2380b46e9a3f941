"""What compiled GPU programs take, as it is recorded (tests/support/compiler_process.py)."""

from __future__ import annotations

import pytest
from compiler_process import RECORD, Record, Sizes

SIZES: Sizes = (1024, 64, 0, "mma.sync")
OTHER: Sizes = (2048, 128, 16, "wgmma")


def never() -> Sizes:
    raise AssertionError("it was compiled")


def record_with(sampled: bool) -> tuple[Record, str]:
    """A record of one program, and its key."""
    for number in range(1000):
        key = f"{number:024}"
        record = Record(f"{key} 1024 64 0 mma.sync\n")
        if record.is_sampled(key) == sampled:
            return record, key
    raise AssertionError("none of a thousand")


def test_what_is_known_is_not_compiled_and_what_is_not_once() -> None:
    record, key = record_with(sampled=False)
    assert record.sizes(key, never) == SIZES
    assert record.sizes("another", lambda: OTHER) == OTHER == record.sizes("another", never)


def test_a_sample_is_compiled_and_has_to_be_as_recorded() -> None:
    record, key = record_with(sampled=True)
    assert record.sizes(key, lambda: SIZES) == SIZES
    with pytest.raises(AssertionError, match="record-compiled"):
        record.sizes(key, lambda: OTHER)


def test_what_was_requested_is_written_and_nothing_else() -> None:
    record, key = record_with(sampled=False)
    assert str(record) == ""
    record.sizes(key, never)
    record.sizes("0" * 23, lambda: OTHER)
    assert str(record).splitlines() == sorted(
        [f"{'0' * 23} 2048 128 16 wgmma", f"{key} 1024 64 0 mma.sync"]
    )
    assert str(Record(str(record))) == "" and Record(str(record)).known == record.known


def test_the_record_here_is_sorted_and_sampled() -> None:
    text = RECORD.read_text()
    record = Record(text)
    assert [line.split()[0] for line in text.splitlines()] == sorted(record.known)
    sampled = sum(map(record.is_sampled, record.known))
    assert 0 < sampled < len(record.known) / 8
