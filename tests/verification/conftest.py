"""The order of the verification: all tests of a subject stand together, so that its models are built once."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Put the faults of each subject behind its properties; what else is collected stays where it is."""
    ours = {item: item.callspec.params["subject"].target for item in items if item.get_closest_marker("verification")}
    order = {target: number for number, target in enumerate(dict.fromkeys(ours.values()))}
    together = iter(sorted(ours, key=lambda item: order[ours[item]]))
    items[:] = [next(together) if item in ours else item for item in items]
