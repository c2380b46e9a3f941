from __future__ import annotations

import os
import queue
import sys
import threading
from types import SimpleNamespace

from mtmd.kernels.resources.priority import BEHIND, NICEST
from mtmd.web.connections.threads import KEPT, InTurn, Pools


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


def test_threads_of_some_kinds_let_those_of_others_go_first():
    pools = Pools({"reads": 9, "sends": 9})
    found: queue.SimpleQueue = queue.SimpleQueue()

    def priority(work, follow=None):
        def service():
            found.put((work, os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            if follow is not None:
                pools.add_task(follow)

        return SimpleNamespace(client="a", work=work, service=service)

    mine = os.getpriority(os.PRIO_PROCESS, os.getpid())
    behind = min(mine + BEHIND, NICEST) if sys.platform == "linux" else mine
    try:
        pools.add_task(priority("reads"))
        assert found.get(timeout=20) == ("reads", mine)
        pools.put_behind({"reads"})
        assert pools.threads == 1 + KEPT, "the others are there before one behind can start them"
        for _ in range(3):  # by a thread that was there, or a new one
            pools.add_task(priority("reads", follow=priority("sends")))
            assert {found.get(timeout=20) for _ in range(2)} == {("reads", behind), ("sends", mine)}
    finally:
        pools.shutdown(5)
