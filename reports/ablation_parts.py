"""The table of parts removed: on a screen, in Markdown and LaTeX, on the page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from veriformer.reports.ablation_tables import DASH, REPEATS, interval, of, reached, unstable
from veriformer.reports.readable import in_a_sheet, in_markdown

Table = Mapping[str, Any]

NAMES: Mapping[str, str] = {"cpu": "CPU", "cuda": "CUDA"}


def title(table: Table) -> str:
    """Return what stands above the table."""
    return f"What is left of a Transformer without {', '.join(table['parts'])}, each pair and all three"


def headings(table: Table) -> list[str]:
    """Return the names of the columns of `cells`."""
    device, other = _devices(table)
    return [
        "task", "depth", "without", f"at its best, {NAMES[device]}", "dead", "steps to 95 %",
        f"at its worst, {NAMES[device]}", "dead", "trains at", "verdict at best", f"best / worst, {NAMES[other]}",
    ]  # fmt: skip


def cells(table: Table) -> list[list[str]]:
    """Return the lines of the table, texts."""
    return [_cells(table, row) for row in table["rows"]]


def _devices(table: Table) -> tuple[str, str]:
    device = table["device"] if table["device"] in NAMES else "cpu"
    return device, next(name for name in NAMES if name != device)


def _cells(table: Table, row: Mapping[str, Any]) -> list[str]:
    device, other = _devices(table)
    line = row["devices"].get(device)
    told = [row["task"], str(row["num_layers"]), " + ".join(row["removed"]) or "nothing"]
    if line is None:
        return [*told, *[DASH] * 8]
    best, worst = line["best"], line["worst"]
    told += [interval(best["accuracy"]), of(best["dead"]), reached(best["steps_to_95"])] if best else [DASH] * 3
    told += [interval(worst["accuracy"]), of(worst["dead"])] if worst else [DASH] * 2
    told += [f"{line['trains']['count']}/{line['trains']['of']}" if line["trains"] else DASH, speech(line)]
    return [*told, elsewhere(row, other)]


def speech(line: Mapping[str, Any]) -> str:
    """Return the verdict of a row at its best, and `unstable` with the share that repeats where too few do."""
    if line["verdict"] is None:
        return DASH
    told = str(line["verdict"])
    if told == "alike if alive" and line["best"]:
        told += f" (dead seeds up to {line['best']['dead']['not_excluded']:.0%} not excluded)"
    return f"{told}{unstable(line['repeats'])}"


def elsewhere(row: Mapping[str, Any], device: str) -> str:
    """Return best and worst on the other device and whether they agree, or a dash where no trial of it is stored."""
    line = row["devices"].get(device)
    if line is None or not line["best"] or not line["worst"]:
        return DASH
    told = f"{line['best']['accuracy'][0]:.3f} / {line['worst']['accuracy'][0]:.3f}"
    agreement = row["agreement"]
    if agreement is None:
        return told
    differs = [name for name, agrees in agreement.items() if not agrees]
    return f"{told}, {'another ' + ' and '.join(differs) if differs else 'agrees'}"


def settings_of(table: Table) -> list[list[str]]:
    """Return, row by row, at which setting of the sweep its best and its worst were found."""
    device, _ = _devices(table)
    told = []
    for row in table["rows"]:
        line = row["devices"].get(device) or {}
        points = [(line.get(stage) or {}).get("point") or DASH for stage in ("best", "worst")]
        told.append([row["task"], str(row["num_layers"]), " + ".join(row["removed"]) or "nothing", *points])
    return told


def words(table: Table) -> list[str]:
    """Return, in sentences, what was trained, how it was tuned, what was judged and what was not."""
    recipe, config, points = table["recipe"], table["config"], table["points"]
    rates, warm_ups, inits = (
        ", ".join(str(v) for v in dict.fromkeys(p[name] for p in points))
        for name in ("learning_rate", "warm_up", "init")
    )
    tuning, first = table["tuning_seeds"], table["first_seed"]
    seeds = ", ".join(f"{t['seeds']} on {t['name']}" for t in table["tasks"])
    fewer = ", ".join(
        f"{t['steps']} on {t['name']}" for t in table["tasks"] if t.get("steps", recipe["steps"]) < recipe["steps"]
    )
    steps = f"{recipe['steps']} steps" + (f" ({fewer})" if fewer else "")
    norm = "norms after each sublayer" if config.get("norm_placement") == "post" else "norms before each sublayer"
    tasks = "; ".join(
        f"{t['name']}: {t['statement']} ({t['length']} tokens of a vocabulary of {t['vocab_size']}, chance "
        f"{t['chance']:g}, {'needs order' if 'positions' in t['needs'] else 'a control that needs no order'})"
        for t in table["tasks"]
    )
    return [
        f"The model is the reference classifier: {' and '.join(map(str, table['depths']))} layers, d_model "
        f"{config['d_model']}, {config['num_heads']} heads, d_ff {config.get('d_ff') or 4 * config['d_model']}, "
        f"{norm}, {config['positions']} positions, mean pooling.",
        f"Tasks: {tasks}.",
        f"Recipe: AdamW, {steps} of {recipe['batch_size']} fresh samples, weight decay "
        f"{recipe['weight_decay']:g}, {recipe['schedule']} learning rate after warm-up.",
        f"One sweep for every row, {len(points)} settings: learning rate {rates} x warm-up {warm_ups} steps x initial "
        f"weights {inits}. {len(tuning)} seeds of every setting ({_span(tuning)}) find the best and the worst by mean "
        f"accuracy, the loss area among equals; other seeds, counted from {first}, report the two: {seeds}. 'Trains "
        f"at' counts settings at which every tuning seed went {100 * table['learned']:.0f} % of the way from chance.",
        "Dead: seeds that ended at chance. The verdict compares a row at its best with nothing removed at its best, "
        "seed by seed. Forced: a theorem, checked exactly on every trained model; such a row has a seed for each "
        "setting of the sweep. Unstable: drawn again from its own seeds and those of rows like it, the verdict repeats "
        f"in less than {100 * REPEATS:.0f} % of the draws.",
    ]  # fmt: skip


def _span(seeds: Sequence[int]) -> str:
    return f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else str(seeds[0]) if seeds else "none"


def theorems(table: Table) -> list[str]:
    """Return one line for every theorem that was checked on trained models, and of which rows these are."""
    groups: dict[tuple[str, str, str, bool], list[Mapping[str, Any]]] = {}
    for row in table["rows"]:
        for device, line in row["devices"].items():
            for name, check in line["checks"].items():
                groups.setdefault((row["task"], device, name, check["holds"]), []).append(check)
    told = []
    for (task, device, name, holds), own in groups.items():
        models, worst = sum(c["models"] for c in own), max(c["difference"] for c in own)
        told.append(
            f"{'✓' if holds else '✗'} {task}, {NAMES.get(device, device)}: {name} changes "
            f"{'no logit' if holds else 'logits'} of {models} trained models in {len(own)} "
            f"{'rows' if len(own) > 1 else 'row'} (largest relative difference {worst:.1e}, float64)"
        )
    return told


def sentences(table: Table) -> list[str]:
    """Return what the table says of each part."""
    return [entry["text"] for entry in table["conclusions"]["sentences"]]


def told_on_a_screen(table: Table) -> Iterator[str]:
    """Yield the lines of a terminal."""
    yield f"\n{title(table)}"
    yield in_text(table, "simple")
    yield from sentences(table)
    yield from theorems(table)


def in_text(table: Table, form: str) -> str:
    """Return the table in a form of `tabulate`."""
    lines = cells(table)
    if form == "pipe":
        lines = [[in_markdown(cell) for cell in line] for line in lines]
    else:
        before: list[str] = []
        for line in lines:
            place = line[:2]
            if place == before:
                line[0] = line[1] = ""
            before = place
    return tabulate(lines, headers=headings(table), tablefmt=form, disable_numparse=True)


def flat(table: Table) -> list[dict[str, Any]]:
    """Return a line of raw numbers for every row, device and stage, for CSV."""
    return [
        {
            "study": "table", "task": row["task"], "setting": f"N={row['num_layers']} {device} {stage}",
            "variant": "+".join(row["removed"]) or "nothing", "seeds": told["seeds"], "accuracy": told["accuracy"][0],
            "accuracy_low": told["accuracy"][1], "accuracy_high": told["accuracy"][2],
            "dead_count": told["dead"]["count"], "dead_of": told["dead"]["of"],
            "diverged_count": told["diverged"]["count"], "diverged_of": told["diverged"]["of"],
            "steps_to_95_mean": told["steps_to_95"]["mean"], "steps_to_95_reached": told["steps_to_95"]["reached"],
            "max_loss": told["max_loss"], "seconds": told["seconds"], "parameters": row["parameters"],
            "flops": row["flops"], "at": in_a_sheet(told["point"] or "every setting"),
            "verdict": in_a_sheet(line["verdict"]) if stage == "best" and line["verdict"] else None,
        }
        for row in table["rows"]
        for device, line in row["devices"].items()
        for stage in ("best", "worst")
        if (told := line[stage])
    ]  # fmt: skip


def markdown(table: Table) -> str:
    """Return the table, what it says and how it was made, as Markdown."""
    told = [f"## {in_markdown(title(table))}\n", in_text(table, "pipe"), ""]
    told += [f"- {in_markdown(line)}" for line in (*sentences(table), *theorems(table))]
    told += ["", in_markdown(table["conclusions"]["rule"]), "", *(f"{in_markdown(line)}\n" for line in words(table))]
    return "\n".join(told)
