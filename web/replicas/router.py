"""Ray Serve asks this, in the process of each front, which replica a request goes to."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from mtmd.web.replicas import choice, ready


class AffinityRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Requests are called with a `Route` as their second argument. Ray takes a copy of this class
    to other processes, and with it copies of this module's variables: what they share is in
    `ready`.
    """

    def initialize_state(self, slack: int, maximum: int) -> None:
        """`maximum`: requests of one replica; the next ones wait here. `slack`: as in `choice`."""
        self._slack, self._maximum = slack, maximum

    def update_replicas(self, replicas: list[Any]) -> None:
        super().update_replicas(replicas)
        self._say_who_is_ready()

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._say_who_is_ready()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where all are full
        _, route = pending_request.args
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        cache = self.replica_queue_len_cache
        loads = {name: cache.get(replica.replica_id) or 0 for name, replica in known.items()}
        return [[known[name]] for name in choice.order(route, loads, self._slack, self._maximum)]

    def _say_who_is_ready(self) -> None:
        ready.names = tuple(sorted(replica.unique_id for replica in self.curr_replicas))
