"""Every state of the page: nothing in it that axe finds serious, nothing wider than the window."""

from __future__ import annotations

from page_states import states


def test_no_state_has_a_serious_finding_of_accessibility_or_is_too_wide(browser, tmp_path):
    result, seen = [], []
    for name, person in states(browser, tmp_path):
        seen.append(name)
        result += [(name, *one) for one in person.axe()]
        if person.overflow() > 0:
            result.append((name, "is wider than it has room"))
    assert not result, result
    assert len(seen) == len(set(seen)) > 40
