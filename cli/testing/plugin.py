"""What every pytest run in an environment loads: options with names of their own, and nothing more until one is used.

`--veriformer TARGET` is always there; `--subject TARGET` says the same where nobody else has an option of that name.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator

import pytest

from veriformer.cli.project import ProjectError
from veriformer.cli.testing.asked import HAS_ALIAS, is_asked
from veriformer.properties.pytest_plugin import Unheld

ALIAS = "--subject"
SETTINGS = {
    "profile": "quick, standard (the default) or thorough",
    "seed": "of every random choice (default: 0)",
    "level": "core or all (the default)",
    "device": "cpu (the default) or cuda",
    "deviations": "TOML file of known deviations, which are expected failures then",
    "kind": "what the subjects are, where that is not told; `veriformer kinds` lists them",
    "call-seconds": "limit for one call of the subject (default: 30)",
    "max-memory": "GiB for each process that judges on the CPU; 0 for no limit (default: 8)",
}
SEVERAL = {
    "declare": "FACT=VALUE, to be verified; `veriformer facts` lists them (may be given again)",
    "dtype": "judge in this dtype alone (may be given again)",
    "only": "judge this property or family alone (may be given again)",
    "exclude": "leave this property or family out (may be given again)",
}
FLAGS = {"allow-open": "open questions are no failures"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of `veriformer check`, each with `--veriformer-` before its name."""
    group = parser.getgroup("veriformer", "veriformer: properties of Transformers, one test each")
    group.addoption(
        "--veriformer", action="append", nargs="?", const="", default=[], metavar="TARGET",
        help="judge package.module:attribute, path/file.py:attribute, path/file.py or a shipped name, in a process of "
        f"its own; without TARGET the subjects of [tool.veriformer] in pyproject.toml. {ALIAS} TARGET is the same, "
        "unless the project or another plugin has an option of that name",
    )  # fmt: skip
    for name, told in SETTINGS.items():
        group.addoption(f"--veriformer-{name}", metavar="VALUE", help=told)
    for name, told in SEVERAL.items():
        group.addoption(f"--veriformer-{name}", action="append", default=[], metavar="VALUE", help=told)
    for name, told in FLAGS.items():
        group.addoption(f"--veriformer-{name}", action="store_true", help=told)


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(early_config: pytest.Config, parser: pytest.Parser) -> Generator[None]:
    """Add the short name once all plugins and conftests have theirs."""
    yield
    if is_free := _is_free(parser, ALIAS):
        group = parser.getgroup("veriformer")
        group.addoption(ALIAS, dest="veriformer", action="append", default=[], metavar="TARGET", help="as --veriformer")
    early_config.stash[HAS_ALIAS] = is_free


def _is_free(parser: pytest.Parser, option: str) -> bool:
    given = f"{option}=TARGET"
    try:
        return given in parser.parse_known_and_unknown_args([given], namespace=argparse.Namespace())[1]
    except (pytest.UsageError, SystemExit):  # it is there, and takes other values
        return False


@pytest.hookimpl(wrapper=True)
def pytest_cmdline_main(config: pytest.Config) -> Generator[None, int, int]:
    """Let the workers of pytest-xdist have whole subjects, unless it is said how tests are handed out."""
    if getattr(config.option, "numprocesses", None) and config.option.dist == "no" and _asked(config):
        config.option.dist = "loadgroup"
    return (yield)


def pytest_configure(config: pytest.Config) -> None:
    """Open the door, if somebody knocks."""
    if not config.option.help and _asked(config):
        from veriformer.cli.testing.door import Door

        config.pluginmanager.register(Door(config), "veriformer-door")


def _asked(config: pytest.Config) -> bool:
    try:
        return is_asked(config)
    except ProjectError as problem:
        raise pytest.UsageError(str(problem)) from None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a failure say what `veriformer check` says of it."""
    report = yield
    if call.excinfo is not None and isinstance(call.excinfo.value, Unheld):
        from veriformer.cli.testing.failing import failure

        report.longrepr = failure(call.excinfo.value, report.nodeid)
    return report
