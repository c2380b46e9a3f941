"""Every library has a lowest version that was tried, and what is pinned is not under it."""

from floors import floor, pinned, requirements
from packaging.version import Version


def test_every_requirement_has_a_floor_at_or_under_the_pinned_version():
    needs = {need.name.lower(): floor(need) for need in requirements()}
    assert {"numpy", "pillow", "torch", "pyarrow"} <= needs.keys() and None not in needs.values()
    versions = pinned()
    assert {
        n for n in needs.keys() & versions.keys() if Version(versions[n]) < Version(needs[n])
    } == set()
