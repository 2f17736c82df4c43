"""What pytest is asked to judge: by `--veriformer`, by ids of rows among its arguments, or by the project."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from veriformer.cli.project import OPTIONS, Project, ProjectError, nearest

HAS_ALIAS = pytest.StashKey[bool]()
"""Whether `--subject` is ours in this run."""

_PROJECT = pytest.StashKey[Project]()
_ROW = re.compile(r"(?P<target>.*[^:]:[^:]+)::(?P<prop>[a-z0-9_-]+\.[a-z0-9_-]+)", re.DOTALL)


def is_asked(config: pytest.Config) -> bool:
    """Whether anything is to be judged.

    Raises:
        ProjectError: something is, and pyproject.toml cannot be relied on.
    """
    if config.getoption("veriformer") or rows_among(config):
        return True
    given = config.args_source is pytest.Config.ArgsSource.ARGS  # who names files or tests wants these alone
    return not given and _project(config).wants_pytest


def _project(config: pytest.Config) -> Project:
    """Return what the project says; nothing where its file cannot be read: a run that asks nothing goes on."""
    if _PROJECT not in config.stash:
        try:
            config.stash[_PROJECT] = nearest(config.invocation_params.dir)
        except ProjectError:
            config.stash[_PROJECT] = Project()
    return config.stash[_PROJECT]


def rows_among(config: pytest.Config) -> dict[str, tuple[str, str]]:
    """Return the arguments that are ids of rows, as they are printed: target and property of each.

    An id that is a path is none of ours.
    """
    found = {}
    for word in config.args:
        if (row := _ROW.fullmatch(word)) and not (config.invocation_params.dir / row["target"]).exists():
            found[word] = row["target"], row["prop"]
    return found


def id_of(config: pytest.Config, target: str) -> str:
    """Return the id of a target among pytest's, which start from the root of the project."""
    place, colon, attribute = target.rpartition(":")
    if not place.endswith(".py"):
        return target
    return f"{os.path.relpath(config.invocation_params.dir / place, config.rootpath)}{colon}{attribute}".replace(
        os.sep, "/"
    )


def target_of(config: pytest.Config, word: str) -> str:
    """Return the target that an id names, as it is printed: what is no file is printed as if it stood at the root."""
    if word.rpartition(":")[0].endswith(".py"):
        return word
    return os.path.relpath(config.invocation_params.dir / word, config.rootpath).replace(os.sep, "/")


def parameters(config: pytest.Config, targets: list[str]) -> tuple[dict[str, Any], str]:
    """Return the parameters that `veriformer check` would have, and which of them come from pyproject.toml.

    Args:
        config: of the run.
        targets: of ids of rows; those of the options come first.

    Raises:
        pytest.UsageError: an option has a wrong value, or nothing is named.
    """
    import copy

    import click

    from veriformer.cli.check import check
    from veriformer.cli.options import told_of_project

    words = []
    for name in OPTIONS:
        value = config.getoption(f"veriformer_{name.replace('-', '_')}")
        if value is True:
            words.append(f"--{name}")
        elif value:
            words += [f"--{name}={one}" for one in (value if isinstance(value, list) else [value])]
    named = dict.fromkeys([*filter(None, config.getoption("veriformer")), *targets])
    try:
        command = copy.copy(check)  # click keeps the words for help of the first context that a command has
        with command.make_context("pytest", [*words, "--", *named]) as context:
            return context.params, told_of_project(context)
    except click.MissingParameter:
        raise pytest.UsageError(
            "--veriformer names no TARGET, and neither does pyproject.toml; give package.module:attribute or "
            'path/file.py:attribute, or write subjects = ["path/file.py:attribute"] in [tool.veriformer]'
        ) from None
    except click.UsageError as problem:
        raise pytest.UsageError(in_pytests_words(problem.format_message())) from None


def in_pytests_words(told: str) -> str:
    """Return a sentence of the command's with the names that its options have in pytest.

    >>> in_pytests_words("leave --device out; --prune removes such entries")
    'leave --veriformer-device out; --prune removes such entries'
    """
    return re.sub(rf"(?<![\w-])--(?=(?:{'|'.join(OPTIONS)})\b)", "--veriformer-", told)
