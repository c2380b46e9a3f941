"""Answers of several replicas as one, as of one server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


class _Given(Collector):
    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Sequence[Metric]:
        return self._metrics


def metrics_of(stated: Mapping[str, bytes], silent: Sequence[str] = ()) -> bytes:
    """Prometheus' text of each replica by its name, with that name as the label `replica`, and
    `mtmd_replica_up`, 0 for those that did not answer.
    """
    together: dict[str, Metric] = {}
    for name, text in stated.items():
        for metric in text_string_to_metric_families(text.decode()):
            one = together.setdefault(
                metric.name, Metric(metric.name, metric.documentation, metric.type)
            )
            one.samples += [
                sample._replace(labels={**sample.labels, "replica": name})
                for sample in metric.samples
            ]
    up = GaugeMetricFamily(
        "mtmd_replica_up", "Whether a replica reports its state.", labels=["replica"]
    )
    for name in (*stated, *silent):
        up.add_metric([name], float(name in stated))
    registry = _Given([*together.values(), up])
    return generate_latest(registry)


def files_of(stated: Mapping[str, bytes]) -> bytes:
    """The lists of uploads of each replica, as one."""
    lists = [json.loads(text) for text in stated.values()]
    return json.dumps(lists[0] | {"data": [one for each in lists for one in each["data"]]}).encode()
