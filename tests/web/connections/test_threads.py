from __future__ import annotations

import queue
import threading
from types import SimpleNamespace

import pytest
from fake_models import registry_of
from fake_service import FakeService
from priorities import on_linux, priority

from mtmd.base.priority import BEHIND, NICEST
from mtmd.web.app import create_app, create_app_of_many
from mtmd.web.connections.channel import HELD
from mtmd.web.connections.threads import KEPT, InTurn, Pools
from mtmd.web.intake.gate import Work
from mtmd.web.server import Server, bind
from mtmd.web.settings import ServerSettings


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


@on_linux
def test_threads_of_some_kinds_let_those_of_others_go_first():
    """However many of the others there are, and whoever starts them."""
    many = KEPT + 2
    pools, all_there = Pools({"reads": 9, "sends": many}), threading.Barrier(many + 1)
    found: queue.SimpleQueue = queue.SimpleQueue()

    def sends():
        found.put(("sends", priority()))
        all_there.wait(20)

    def reads(follow):
        def service():
            found.put(("reads", priority()))
            for _ in range(follow):
                pools.add_task(SimpleNamespace(client="a", work="sends", service=sends))

        return SimpleNamespace(client="a", work="reads", service=service)

    mine = priority()
    try:
        pools.add_task(reads(0))
        assert found.get(timeout=20) == ("reads", mine)
        pools.put_behind({"reads"})
        pools.add_task(reads(many))  # by a thread that was there
        all_there.wait(20)
        pools.add_task(reads(0))
        expected = [("reads", min(mine + BEHIND, NICEST))] * 2 + [("sends", mine)] * many
        assert sorted(found.get(timeout=20) for _ in expected) == expected
    finally:
        pools.shutdown(5)


@pytest.mark.parametrize("many", [False, True], ids=["one model", "several"])
def test_of_a_server_those_that_read_requests_are_behind_those_that_send_answers(many):
    settings, service = ServerSettings(port=0), FakeService()
    registry, _ = registry_of({"a": 1})
    app = create_app_of_many(registry, settings) if many else create_app(service, settings)
    server = Server(app, settings, bind(settings))
    server.stop()
    server.serve(closing=registry.close)
    pools = server.task_dispatcher._pools
    ahead = {kind for kind, pool in pools.items() if not pool.behind}
    assert ahead == {HELD, Work.FOLLOW, Work.AT_ONCE} and pools.keys() - ahead
