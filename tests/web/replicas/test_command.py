"""What is known before anything is deployed."""

from __future__ import annotations

import pytest

from mtmd.cluster.connect import Seats
from mtmd.web.replicas.command import room


@pytest.mark.parametrize(
    ("seats", "count"),
    [
        (Seats(4, 2, 0, 2), 5),
        (Seats(4, 2, 1, 2), 2),
        (Seats(4, 8, 1, 8), 1),
        (Seats(4, 16, 0, 16), 0),
    ],
    ids=["CPUs", "GPUs", "CPUs beside GPUs", "too many"],
)
def test_machines_have_room_for_so_many_replicas(seats, count):
    there = [{"CPU": 2.0, "memory": 1e9}, {"CPU": 8.0, "GPU": 2.0}, {"GPU": 1.0}]
    assert room(there, seats) == count
