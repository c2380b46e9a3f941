"""Every library has a lowest version that was tried, and what is pinned is not under it."""

import sys

from floors import floor, pinned, requirements
from packaging.version import Version


def test_every_requirement_has_a_floor_at_or_under_the_pinned_version():
    needs = {need.name.lower(): floor(need) for need in requirements()}
    assert {"numpy", "pillow", "torch", "pyarrow"} <= needs.keys() and None not in needs.values()
    versions = pinned()
    assert {
        n for n in needs.keys() & versions.keys() if Version(versions[n]) < Version(needs[n])
    } == set()


def test_pillow_is_one_whose_decoders_were_mended():
    """12.2 took 3.9 GB for a bitmap of 1,086 bytes; 13 needs Python 3.11."""
    (need,) = [need for need in requirements() if need.name == "pillow"]
    minimum = "13" if sys.version_info >= (3, 11) else "12.3"
    assert Version(floor(need)) >= Version(minimum) and not need.specifier.contains("12.2")
