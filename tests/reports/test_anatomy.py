"""The anatomy as a tree."""

from __future__ import annotations

from rich.console import Console

from veriformer.reports.anatomy import tree_of


def printed(parts: list[dict[str, str]]) -> list[str]:
    plain = Console(width=100, force_terminal=False)
    with plain.capture() as taken:
        plain.print(tree_of(parts))
    return taken.get().splitlines()


def test_like_layers_in_a_row_are_told_once_and_lone_modules_with_what_they_hold() -> None:
    layer = lambda n, words: [  # noqa: E731
        {"part": "norm", "place": f"layers.{n}.norm", "words": words},
        {"part": "attention", "place": f"layers.{n}.inner.attention", "words": "2 heads"},
    ]
    parts = [
        {"part": "positions", "place": "", "words": "sinusoids"},
        *layer(0, "LayerNorm"),
        *layer(1, "LayerNorm"),
        *layer(2, "RMSNorm"),
    ]
    assert printed(parts) == [
        "what flows inside",
        "├── positions  sinusoids",
        "└── layers",
        "    ├── 0 .. 1",
        "    │   ├── norm  norm  LayerNorm",
        "    │   └── inner.attention  attention  2 heads",
        "    └── 2",
        "        ├── norm  norm  RMSNorm",
        "        └── inner.attention  attention  2 heads",
    ]


def test_a_part_that_acts_several_times_is_counted() -> None:
    part = {"part": "norm", "place": "shared", "words": "RMSNorm"}
    assert printed([part, part]) == ["what flows inside", "└── shared  norm  RMSNorm  (2 times)"]
