"""What the table says of each part, in sentences that a rule makes of the numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from veriformer.ablations.statistics.intervals import mean_interval
from veriformer.ablations.statistics.paired import ALPHA, holm
from veriformer.ablations.table.design import PARTS, Cell, Design

RANGE = "width of the range in which training works"

RULE = (
    "A part buys accuracy where the row without it is judged to hurt at the best setting of each; it does not where "
    "the two are equivalent or alike, or the row without it helps. It buys width of the range where fewer settings of "
    "the sweep train without it than with it: settings that train in one of the two alone, exact sign test, p < "
    f"{ALPHA:g} after Holm over all parts, depths and tasks of the table. What neither test decides is open. "
    "Two parts depend on each other where the 95 % interval of the interaction of their losses leaves zero out."
)
"""How the sentences come about; printed beside them."""

Line = Mapping[str, Any]


def conclusions(design: Design, lines: Sequence[Line]) -> dict[str, Any]:
    """Return the rule, and a sentence for each part and task, each with the tests that it rests on.

    Args:
        design: of the table.
        lines: one a cell, in the design's order.
    """
    by_cell = dict(zip(design.cells(), lines, strict=True))
    told = [
        _comparison(part, Cell(task, depth, ()), Cell(task, depth, (part,)), by_cell)
        for part, task, depth in itertools.product(PARTS, design.tasks, design.depths)
    ]
    tested = [t for t in told if t["range_p"] is not None]
    for entry, p in zip(tested, holm([t["range_p"] for t in tested]), strict=True):
        entry["range_p_holm"] = p
    for entry in told:
        entry["buys"] = _buys(entry)
    sentences = []
    together = [t for t in (_pair(design, cell, by_cell) for cell in design.cells()) if t is not None]
    for part, task in itertools.product(PARTS, design.tasks):
        own = [t for t in told if (t["part"], t["task"]) == (part, task)]
        if all(t["buys"] for t in own):
            sentences.append({"part": part, "task": task, "text": _sentence(part, task, own)})
    for task, first, second in dict.fromkeys((t["task"], *t["parts"]) for t in together):
        own = [t for t in together if (t["task"], *t["parts"]) == (task, first, second)]
        sentences.append({"part": f"{first}+{second}", "task": task, "text": _of_pairs(own)})
    return {"rule": RULE, "sentences": sentences, "comparisons": told, "pairs": together}


def _pair(design: Design, cell: Cell, by_cell: Mapping[Cell, Line]) -> dict[str, Any] | None:
    """Return whether two parts removed together cost what the two cost apart, seed by seed, each at its best."""
    if len(cell.removed) != 2 or cell.is_forced:
        return None
    four = [Cell(cell.task, cell.num_layers, removed) for removed in ((), cell.removed[:1], cell.removed[1:])]
    lines = [by_cell.get(c) for c in (*four, cell)]
    if any(line is None or not line["best"] for line in lines):
        return None
    base, first, second, both = (line["best"]["by_seed"] for line in lines if line is not None)
    more = mean_interval([b - f - s + w for w, f, s, b in zip(base, first, second, both, strict=True)])
    return {
        "task": cell.task, "num_layers": cell.num_layers, "parts": list(cell.removed),
        "accuracy": [sum(v) / len(v) for v in (base, first, second, both)],
        "interaction": [v if math.isfinite(v) else None for v in (more.value, more.low, more.high)],
    }  # fmt: skip


def _of_pairs(entries: Sequence[Mapping[str, Any]]) -> str:
    """Return how two parts go together; what is decided is that the interval of the interaction leaves zero out."""
    first, second = entries[0]["parts"]
    told = []
    for entry in entries:
        value, low, high = entry["interaction"]
        is_open = low is None or high is None or low <= 0 <= high
        word = "no more and no less than" if is_open else "less than" if value > 0 else "more than"
        seen = " as far as these seeds tell" if is_open else ""
        ends = "" if low is None or high is None else f", interaction {value:+.3f} [{low:+.3f}, {high:+.3f}]"
        _, one, other, both = entry["accuracy"]
        told.append(
            f"at depth {entry['num_layers']} to lose both costs {word} the sum of the two{seen} ({both:.3f} "
            f"without both, {one:.3f} without {first}, {other:.3f} without {second}{ends})"
        )
    return f"On {entries[0]['task']}, {first} and {second}: {'; '.join(told)}."


def _comparison(part: str, whole: Cell, without: Cell, by_cell: Mapping[Cell, Line]) -> dict[str, Any]:
    base, line = by_cell[whole], by_cell.get(without)
    entry: dict[str, Any] = {
        "part": part, "task": whole.task, "num_layers": whole.num_layers, "forced": without.is_forced,
        "verdict": line["verdict"] if line else None, "accuracy": None, "base_accuracy": None,
        "trains": None, "base_trains": None, "of": None, "range_p": None, "range_p_holm": None,
    }  # fmt: skip
    if line is None or not base["best"] or not line["best"]:
        return entry
    entry |= {"base_accuracy": base["best"]["accuracy"][0], "accuracy": line["best"]["accuracy"][0]}
    if base["trains"] and line["trains"]:
        pairs = list(zip(base["trains"]["by_point"], line["trains"]["by_point"], strict=True))
        lost, won = sum(b and not v for b, v in pairs), sum(v and not b for b, v in pairs)
        entry |= {"base_trains": base["trains"]["count"], "trains": line["trains"]["count"], "of": len(pairs)}
        entry["range_p"] = float(stats.binomtest(lost, lost + won).pvalue) if lost + won else 1.0
    return entry


def _buys(entry: Mapping[str, Any]) -> str | None:
    """Return what a part buys at one depth; None where its trials are not all there."""
    found = entry["verdict"]
    if found is None or entry["base_accuracy"] is None:
        return None
    if entry["forced"]:
        return "the order of the tokens" if found == "forced" else None
    is_sure = entry["range_p_holm"] is not None and entry["range_p_holm"] < ALPHA
    narrower = is_sure and entry["trains"] < entry["base_trains"]
    told = {
        ("hurts", True): f"accuracy at its best, and {RANGE}",
        ("hurts", False): "accuracy at its best",
        ("free", True): f"{RANGE}, not accuracy at its best",
        ("free", False): "neither accuracy at its best nor a wider range that this sweep could show",
        ("open", True): f"{RANGE}; whether accuracy at its best too is open",
        ("open", False): "nothing that this sweep and these seeds could show",
    }
    is_free = found == "helps" or found.startswith(("equivalent", "alike"))
    kind = "hurts" if found == "hurts" else "free" if is_free else "open"
    bought = told[kind, narrower]
    if is_sure and entry["trains"] > entry["base_trains"]:
        bought += " (and the range is wider without it)"
    return bought


def _sentence(part: str, task: str, entries: Sequence[Mapping[str, Any]]) -> str:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry["buys"], []).append(entry)
    parts = [
        f"at depth {' and '.join(str(e['num_layers']) for e in own)} {part} {'buy' if part == 'positions' else 'buys'} "
        f"{bought} ({'; '.join(_numbers(e) for e in own)})"
        for bought, own in groups.items()
    ]
    return f"On {task}, {', '.join(parts)}."


def _numbers(entry: Mapping[str, Any]) -> str:
    depth = f"N={entry['num_layers']}:"
    if entry["forced"]:
        return f"{depth} {entry['accuracy']:.3f} without, a theorem checked exactly, {entry['base_accuracy']:.3f} with"
    told = f"{depth} {entry['accuracy']:.3f} without, {entry['base_accuracy']:.3f} with: {entry['verdict']}"
    return f"{told}; trains at {entry['trains']} of {entry['of']} settings, {entry['base_trains']} with"
