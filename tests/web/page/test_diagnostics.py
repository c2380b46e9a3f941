"""How fast memory is read, as the verdict tells it beside an answer's speed."""

from __future__ import annotations

import pytest
from fake_models import registry_of

from mtmd import DeviceError, MtmdError
from mtmd.base.cores import Cores
from mtmd.service.stats import ServiceStats
from mtmd.web.page import diagnostics


class Machine:
    """A registry of two models, one of which is asked how fast memory is; `meanwhile` is done while
    that is measured.
    """

    def __init__(self, monkeypatch):
        self.registry, _ = registry_of({"a": 1, "b": 1})
        self.registry.start()
        self.a, self.b = (self.registry.take(name) for name in "ab")
        for entry in (self.a, self.b):
            self.registry.give_back(entry)
        self.a.served.service.read_rate = self._rate_of
        self.ceiling, self.meanwhile = diagnostics._Ceiling(self.registry), lambda: None
        monkeypatch.setattr(diagnostics, "step_bytes", lambda _: 1e9)

    def _rate_of(self, device):
        assert device == "cpu"
        self.meanwhile()
        return 5e9

    def ask(self, measure=True):
        return self.ceiling.of(self.a.served, measure)


@pytest.fixture
def machine(monkeypatch):
    made = Machine(monkeypatch)
    yield made
    made.registry.close()


def test_it_is_measured_once_and_only_where_that_is_wanted(machine):
    assert machine.ask(measure=False) is None
    assert machine.ask() == 5e9
    machine.meanwhile = pytest.fail
    assert machine.ask() == machine.ask(measure=False) == 5e9


def test_what_another_model_does_meanwhile_is_not_taken_for_a_slow_memory(machine):
    other = machine.b.served.service
    other.under_way.append("an answer")
    assert machine.ask() is None, "it is being asked"
    other.under_way.clear()
    messages = [{"role": "user", "content": "hi"}]
    for meanwhile in (
        lambda: other.submit(messages),  # over by the end, too
        lambda: other.under_way.append("an answer"),
    ):
        machine.meanwhile = meanwhile
        assert machine.ask() is None
    other.under_way.clear()
    machine.meanwhile = lambda: None
    assert machine.ask() == 5e9


def failing(error):
    def fail(_):
        raise error

    return fail


def test_a_model_that_is_unloaded_meanwhile_is_measured_another_time(machine):
    service, measured = machine.a.served.service, machine.a.served.service.read_rate
    service.read_rate = failing(MtmdError("the service is closed"))
    machine.a.served, served = None, machine.a.served
    assert machine.ceiling.of(served, True) is None
    machine.a.served = served
    service.read_rate = measured
    assert machine.ask() == 5e9


def test_a_fault_of_the_device_is_raised(machine):
    machine.a.served.service.read_rate = failing(DeviceError("the device hangs"))
    with pytest.raises(DeviceError):
        machine.ask()


def test_what_cannot_be_measured_is_told_in_the_log_and_not_tried_again(machine, caplog):
    machine.a.served.service.read_rate = failing(MtmdError("512 MiB are not free"))
    assert machine.ask() is None
    machine.a.served.service.read_rate = pytest.fail
    assert machine.ask() is None
    assert caplog.text.count("memory of cpu is cannot be measured: 512 MiB are not free") == 1


def test_cores_are_those_that_may_be_used(monkeypatch):
    monkeypatch.setattr(diagnostics, "usable_cores", lambda: Cores(64, 1.5))
    assert diagnostics._machine(None, ServiceStats())["cpus"] == 2


def test_the_engines_process_counts(monkeypatch):
    monkeypatch.setattr(diagnostics, "resident_bytes", lambda: 5)
    counted = ServiceStats(engine_bytes=70, engine_cpu_seconds=1e6)
    result = diagnostics._machine(None, counted)
    assert result["resident_bytes"] == 75 and 1e6 < result["cpu_seconds"] < 2e6
    monkeypatch.setattr(diagnostics, "resident_bytes", lambda: None)
    assert diagnostics._machine(None, counted)["resident_bytes"] is None
