"""The pytest plugin: `pytest --subject TARGET` adds one test a property. Inert without the option; loads no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import resources
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from veriformer.properties.engine.property import Property
    from veriformer.properties.judging.judge import Judge


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("veriformer")
    group.addoption("--subject", action="append", default=[], metavar="TARGET",
                    help="judge package.module:attribute, path/file.py:attribute, or a shipped name")  # fmt: skip
    group.addoption("--subject-profile", default="standard", help="quick, standard or thorough (default: standard)")


LEVELS = {
    "core": "a property whose failure is a defect",
    "extended": "a property that follows from a declared convention",
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks of every test of a property: its level, and its family."""
    recorded = resources.files("veriformer.properties.judging").joinpath("faults_killed.json")
    families = dict.fromkeys(i.partition(".")[0] for i in json.loads(recorded.read_text(encoding="utf-8")))
    for name, told in {**LEVELS, **{f: f"a property of the family {f}" for f in families}}.items():
        config.addinivalue_line("markers", f"{name}: {told}")


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the items of every target."""
    for target in config.getoption("--subject"):
        items.extend(_items(session, target, config.getoption("--subject-profile")))


def _items(session: pytest.Session, target: str, profile: str) -> Iterator[pytest.Item]:
    from veriformer.properties.adapters.target import TargetError
    from veriformer.properties.bench.profiles import Settings
    from veriformer.properties.judging.catalogue import select
    from veriformer.properties.judging.judge import Judge
    from veriformer.properties.targets import load

    try:
        subjects, settings = load(target), Settings(profile=profile)
    except (TargetError, ValueError) as problem:
        raise pytest.UsageError(str(problem)) from None
    for subject in subjects:
        judge = Judge(subject, settings)
        for prop in select():
            if subject.kind in prop.kinds:
                yield PropertyItem.from_parent(session, name=f"{subject.target}[{prop.id}]", judge=judge, prop=prop)


class PropertyItem(pytest.Item):
    """One property of one subject as a test."""

    def __init__(self, *, judge: Judge, prop: Property, **given: Any) -> None:
        super().__init__(**given)
        self.judge, self.prop = judge, prop
        for mark in (prop.level, prop.family):
            self.add_marker(mark)

    def runtest(self) -> None:
        """Judge it."""
        from veriformer.properties.parametrizing import settle

        settle(self.judge, self.prop)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return where the item stands: the target itself."""
        return self.path, None, self.name
