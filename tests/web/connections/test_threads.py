from __future__ import annotations

from types import SimpleNamespace

from mtmd.web.connections.threads import InTurn


def test_one_client_with_many_requests_keeps_no_other_waiting():
    queue = InTurn()
    for client, number in [
        *(("many", n) for n in range(5)),
        ("other", 0),
        ("third", 0),
        ("other", 1),
    ]:
        queue.append(SimpleNamespace(client=client, number=number))
    assert len(queue) == 8
    order = []
    while queue:
        task = queue.popleft()
        order.append((task.client, task.number))
    assert order[:5] == [("many", 0), ("other", 0), ("third", 0), ("many", 1), ("other", 1)]
    assert order[5:] == [("many", n) for n in (2, 3, 4)] and len(queue) == 0
