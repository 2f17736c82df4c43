"""The anatomy of a model as a tree of its modules: what each part is, by the numbers that flow through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text
from rich.tree import Tree


@dataclass
class _Node:
    """A module: what is recognised in it, and the modules inside.

    Attributes:
        lines: parts, each with its kind and words.
        inside: modules by name, in the order in which they act.
    """

    lines: list[tuple[str, str]] = field(default_factory=list)
    inside: dict[str, _Node] = field(default_factory=dict)


def tree_of(parts: Sequence[dict[str, Any]]) -> Tree:
    """Return the parts of a model below the modules that compute them; like modules in a row are told once.

    Args:
        parts: records of `part`, `place` and `words`, in the order of the flow.
    """
    root = _Node()
    for part in parts:
        node = root
        for name in part["place"].split(".") if part["place"] else ():
            node = node.inside.setdefault(name, _Node())
        node.lines.append((part["part"], part["words"]))
    tree = Tree("what flows inside")
    _grow(tree, root)
    return tree


def _grow(tree: Tree, node: _Node) -> None:
    for line in dict.fromkeys(node.lines):
        tree.add(_line(*line, node.lines.count(line)))
    for name, inside in _grouped(node.inside):
        while not inside.lines and len(inside.inside) == 1:  # a module that holds one other is told with it
            ((own, inner),) = inside.inside.items()
            name, inside = f"{name}.{own}", inner
        if inside.inside or len(set(inside.lines)) > 1:
            _grow(tree.add(Text(name, style="bold")), inside)
        elif inside.lines:
            tree.add(Text.assemble((name, "bold"), "  ", _line(*inside.lines[0], len(inside.lines))))


def _line(part: str, words: str, count: int) -> Text:
    return Text.assemble((part, "cyan"), f"  {words}", f"  ({count} times)" if count > 1 else "")


def _grouped(inside: dict[str, _Node]) -> Iterator[tuple[str, _Node]]:
    """Yield modules with their names; those that are alike and follow one another under one name, "0 .. 11"."""
    row: list[tuple[str, _Node]] = []
    for name, node in inside.items():
        if row and not (name.isdigit() and row[-1][0].isdigit() and node == row[-1][1]):
            yield _together(row)
            row = []
        row.append((name, node))
    if row:
        yield _together(row)


def _together(row: list[tuple[str, _Node]]) -> tuple[str, _Node]:
    return row[0][0] if len(row) == 1 else f"{row[0][0]} .. {row[-1][0]}", row[0][1]
