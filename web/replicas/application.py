"""The application that Ray Serve runs: fronts that clients reach, and replicas of the server."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError
from ray.serve.schema import LoggingConfig

from mtmd.cluster.connect import PoolSize
from mtmd.web.replicas import ready
from mtmd.web.replicas.choice import Route
from mtmd.web.replicas.forwarded import (
    LEAVING_S,
    Forwarded,
    Full,
    Lost,
    Part,
    Serving,
    SettingsOf,
    Taken,
)
from mtmd.web.replicas.front import OF_ONE_FRONT, Front
from mtmd.web.replicas.replica import Replica
from mtmd.web.replicas.replica_slots import SPARE, scaling
from mtmd.web.replicas.router import AffinityRouter
from mtmd.web.settings import ServerSettings

REPLICAS = "Replica"
BATCHES = 2  # of answers that one replica has at once: one that is computed, and the next
SLACK = 4  # the part of a batch by which one replica may be busier than another for its caches
FRONT_REQUESTS = 100_000  # Ray's limit for a front, which has its own
STARTS = 3  # of the first replicas, where nobody waits to hear of it
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 5.0, 30.0


@dataclass(frozen=True)
class Requested:
    """`minimum` to `maximum` replicas, of which each computes `parallel` answers at once."""

    minimum: int
    maximum: int
    size: PoolSize
    parallel: int
    affinity: bool = True


class Handles:
    """A `Replicas`, by a handle of Ray's."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle.options(stream=True)

    @property
    def names(self) -> Sequence[str]:
        return ready.names

    async def answer(self, request: Forwarded, route: Route) -> AsyncGenerator[Part, None]:
        response, replica = self._handle.answer.remote(request, route), ""
        del request  # Ray has it
        try:
            async for part in response:
                if isinstance(part, Taken):
                    replica = part.replica
                yield part
        except BackPressureError as error:
            raise Full from error
        except RayActorError as error:
            raise Lost(replica) from error
        finally:
            response.cancel()


@serve.ingress()
class Fronts:
    def __init__(
        self,
        replicas: Any,
        options: Mapping[str, Any],
        settings_of: SettingsOf,
        affinity: bool,
        fronts: int,
        each: int,
        command: str,
    ) -> None:
        settings = settings_of(Namespace(**options))
        self._front = Front(Handles(replicas), settings, affinity, fronts, each)
        self._command = command

    async def command(self) -> str:
        """Return the name of the command that has deployed this."""
        return self._command

    def __serve_build_asgi_app__(self) -> Any:
        return self._front


def application(
    requested: Requested,
    options: Mapping[str, Any],
    settings: ServerSettings,
    settings_of: SettingsOf,
    serving: Serving,
    command: str = "",
) -> Any:
    """`options`: of the command, as every machine understands them; see `Replica`. `command`: its
    own name among those that may deploy this.
    """
    each = BATCHES * requested.parallel
    size = requested.size
    quiet = LoggingConfig(enable_access_log=False, log_level="WARNING")
    actor = {"num_cpus": size.cpus, **({"num_gpus": size.gpus} if size.gpus else {})}
    replicas = serve.deployment(Replica).options(
        name=REPLICAS,
        max_ongoing_requests=2 * (each + SPARE),  # with what it alone can answer
        max_queued_requests=-1,  # they wait in fronts
        ray_actor_options=actor,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        graceful_shutdown_timeout_s=settings.drain_s + LEAVING_S,
        graceful_shutdown_wait_loop_s=0.5,
        max_constructor_retry_count=1 if command else STARTS,
        logging_config=quiet,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter,
            request_router_kwargs={
                "slack": max(1, requested.parallel // SLACK),
                "maximum": each + SPARE,
            },
            max_backoff_s=0.1,
        ),
        **scaling(requested.minimum, requested.maximum, requested.parallel),
    )
    several = 1 if settings.rate_limit else math.ceil(requested.maximum / OF_ONE_FRONT)
    fronts = serve.deployment(Fronts).options(
        name="Front",
        num_replicas=several,
        max_ongoing_requests=FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=settings.drain_s + LEAVING_S,
        graceful_shutdown_wait_loop_s=0.5,
        logging_config=quiet,
    )
    bound = replicas.bind(options, settings_of, serving, settings.needs_key, replica_name)
    return fronts.bind(bound, options, settings_of, requested.affinity, several, each, command)


def replica_name() -> str:
    """Return the name of the replica in whose process this is called."""
    return str(serve.get_replica_context().replica_id.unique_id)
