"""Every route of the server, out of its own map: none is left out of an attack."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from fake_service import FakeService

from mtmd.web.app import create_app
from mtmd.web.intake.request_limits import Body, takes_of
from mtmd.web.settings import ServerSettings


@dataclass(frozen=True)
class Route:
    """`rule`: the path, with a name in angle brackets where it has a part of its own."""

    method: str
    rule: str
    body: Body

    def path(self, *parts: str) -> str:
        """With these in place of its own parts, the last for all that are left."""
        left = list(parts)
        return re.sub(r"<[^>]+>", lambda _: left.pop(0) if len(left) > 1 else left[0], self.rule)


@lru_cache(maxsize=1)
def routes() -> tuple[Route, ...]:
    """In the same order wherever it is asked for."""
    app = create_app(FakeService(), ServerSettings())
    result = []
    for rule in app.url_map.iter_rules():
        what = takes_of(app.view_functions[rule.endpoint])
        assert what is not None
        result += [Route(m, rule.rule, what.body) for m in rule.methods or () if m != "HEAD"]
    return tuple(sorted(result, key=lambda route: (route.rule, route.method)))
