"""What needs no torch does not import it, and says what the catalogue says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

from veriformer.cli.index import RECORD, live
from veriformer.cli.main import commands
from veriformer.cli.saying import parsed
from veriformer.cli.words import optional_callables

ROOT = Path(__file__).parents[2]


def test_the_index_is_that_of_the_catalogue() -> None:
    recorded = json.loads((ROOT / "cli" / RECORD).read_text(encoding="utf-8"))
    assert recorded == json.loads(json.dumps(live())), "write it anew: python tests/record_index.py"


def test_what_lists_and_explains_imports_no_torch() -> None:
    program = (
        "import contextlib, sys\n"
        "from veriformer.cli.main import main\n"
        "for words in (['list'], ['list', '--format', 'json', '--kind', 'norm'], ['explain', 'causality'],\n"
        "              ['explain', 'window'], ['explain', 'decoder'], ['explain', 'CM01'], ['explain', 'nothing'],\n"
        "              ['kinds'], ['facts'], ['ablate', '--list'], ['--help'], ['check', '--help']):\n"
        "    with contextlib.suppress(SystemExit):\n"
        "        main(words)\n"
        "    print('torch' in sys.modules, 'scipy' in sys.modules, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stderr.count("False False") == 12
    assert "True" not in ran.stderr
    assert "window (a fact)" in ran.stdout
    assert "shown by  " in ran.stdout


def test_every_command_is_there_and_its_help_is_its_first_sentence() -> None:
    for name in commands.list_commands(None):  # type: ignore[arg-type]
        command = commands.get_command(None, name)  # type: ignore[arg-type]
        assert isinstance(command, click.Command)
        assert command.name == name


def test_values_are_read_as_their_facts_take_them() -> None:
    assert [parsed(*pair) for pair in (("causal", "true"), ("window", "4"), ("attention_scale", "0.5"))] == [
        True,
        4,
        0.5,
    ]
    assert parsed("attention_scale", "1/sqrt(d_head)") == "1/sqrt(d_head)"
    assert parsed("special_ids", "[1, 2]") == [1, 2]


def test_what_a_subject_may_offer_has_signatures() -> None:
    told = optional_callables()
    assert {"weights", "cache", "generate", "projections", "embed", "router"} <= set(told)
    assert told["cache"].startswith("`cache(model, chunks, attention_mask=None, reorder=None)`")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--declare", "causl=True"], "did you mean 'causal'"),
        (["--declare", "causal=maybe"], "it must be True or False"),
        (["--declare", "causal"], "write FACT=VALUE"),
        (["--kind", "decodr"], "did you mean 'decoder'"),
    ],
)
def test_what_is_misspelt_is_suggested(words: list[str], told: str) -> None:
    for name in ("check", "identify", "init"):
        command = commands.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        with pytest.raises(click.UsageError) as problem:
            command.make_context(name, ["x.py:a", *words])
        assert told in str(problem.value)
