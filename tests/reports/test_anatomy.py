"""The anatomy as a tree."""

from __future__ import annotations

from rich.console import Console

from veriformer.reports.anatomy import drawn, tree_of


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


def test_a_page_draws_boxes_with_heads_by_their_keys_and_what_was_measured() -> None:
    attention = {
        "part": "attention", "place": "layers.0.attention", "words": "4 heads",
        "measured": {"heads": 4, "groups": 2, "scale": 0.25, "bias": None},
    }  # fmt: skip
    boxes = drawn([attention, {**attention, "place": "layers.1.attention"}, {**attention, "place": "", "words": "own"}])
    own, layers = boxes
    assert own["parts"][0]["words"] == "own"
    assert layers["name"] == "layers"
    ((row,),) = (layers["inside"],)
    assert row["name"] == "0 .. 1.attention"
    (part,) = row["parts"]
    assert part["heads"] == [0, 0, 1, 1]
    assert part["measured"] == [("heads", "4"), ("groups", "2"), ("scale", "0.25")]
