"""The anatomy of a model as a tree of its modules: what each part is, by the numbers that flow through it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text
from rich.tree import Tree

_MOST = 64  # heads that are drawn


@dataclass
class Node:
    """A module: what is recognised in it, and the modules inside.

    Attributes:
        lines: parts, each with its kind and words.
        inside: modules by name, in the order in which they act.
        parts: the records of the lines.
    """

    lines: list[tuple[str, str]] = field(default_factory=list)
    inside: dict[str, Node] = field(default_factory=dict)
    parts: list[dict[str, Any]] = field(default_factory=list, compare=False)


def tree_of(parts: Sequence[dict[str, Any]]) -> Tree:
    """Return the parts of a model below the modules that compute them; like modules in a row are told once.

    Args:
        parts: records of `part`, `place` and `words`, in the order of the flow.
    """
    tree = Tree("what flows inside")
    _grow(tree, nested(parts))
    return tree


def nested(parts: Sequence[dict[str, Any]]) -> Node:
    """Return the model as modules in modules, each with its parts; see `tree_of`."""
    root = Node()
    for part in parts:
        node = root
        for name in part["place"].split(".") if part["place"] else ():
            node = node.inside.setdefault(name, Node())
        node.lines.append((part["part"], part["words"]))
        node.parts.append(part)
    return root


def drawn(parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return what a page draws: boxes of `name`, `parts` and `inside`, with like modules in a row told once.

    Each part has `part`, `words`, `measured` as pairs of words, `times`, and of an attention its `heads`: the number of
    the group of keys that each reads.
    """
    root = nested(parts)
    return [{"name": "", "parts": _chips(root), "inside": []}] * bool(root.parts) + _boxes(root)


def _boxes(node: Node) -> list[dict[str, Any]]:
    boxes = []
    for name, inside in _grouped(node.inside):
        while not inside.lines and len(inside.inside) == 1:
            ((own, inner),) = inside.inside.items()
            name, inside = f"{name}.{own}", inner
        boxes.append({"name": name, "parts": _chips(inside), "inside": _boxes(inside)})
    return boxes


def _chips(node: Node) -> list[dict[str, Any]]:
    told: dict[tuple[str, str], dict[str, Any]] = {}
    for line, part in zip(node.lines, node.parts, strict=True):
        told.setdefault(line, part)
    return [
        {
            "part": part["part"], "words": part["words"], "times": node.lines.count(line), "heads": _heads(part),
            "measured": [(name.replace("_", " "), _number(value)) for name, value in part["measured"].items()
                         if value is not None],
        }
        for line, part in told.items()
    ]  # fmt: skip


def _heads(part: dict[str, Any]) -> list[int]:
    """Return the group of keys of each head of an attention; none of another part."""
    count = part["measured"].get("heads") or 0
    groups = part["measured"].get("groups") or count
    return [head * groups // count for head in range(min(count, _MOST))]


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {shape}" for name, shape in value.items())
    return ", ".join(map(_number, value)) if isinstance(value, list) else str(value)


def _grow(tree: Tree, node: Node) -> None:
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


def _grouped(inside: dict[str, Node]) -> Iterator[tuple[str, Node]]:
    """Yield modules with their names; those that are alike and follow one another under one name, "0 .. 11"."""
    row: list[tuple[str, Node]] = []
    for name, node in inside.items():
        if row and not (name.isdigit() and row[-1][0].isdigit() and node == row[-1][1]):
            yield _together(row)
            row = []
        row.append((name, node))
    if row:
        yield _together(row)


def _together(row: list[tuple[str, Node]]) -> tuple[str, Node]:
    return row[0][0] if len(row) == 1 else f"{row[0][0]} .. {row[-1][0]}", row[0][1]
