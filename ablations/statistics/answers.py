"""What is made of the finished rows of a study beside accuracy: laws, calibration, other lengths, entropy, shapes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from veriformer.ablations.statistics.fits import check_power
from veriformer.ablations.statistics.intervals import Interval, mean_interval
from veriformer.ablations.statistics.paired import ALPHA, Comparison, holm

Row = Mapping[str, Any]
Rows = Sequence[Row]

WORTHLESS = 0.005
"""Accuracy, half a point, below which a head that falls silent was dormant."""


def scaling_law(rows: Rows) -> dict[str, Any]:
    """Fit the loss above the floor against parameters, and against samples, as power laws; and say if they are any.

    Rows `d=...` differ in size, rows `samples=...` in data, the other quantity being at its largest; the fit is of
    means over seeds (Kaplan et al. 2020, section 3), the test of fit of the seeds.
    """
    result: dict[str, Any] = {"kind": "scaling-law", "fits": {}, "lines": [], "found": {}}
    for task in dict.fromkeys(r["task"] for r in rows):
        own = [r for r in rows if r["task"] == task]
        sizes = sorted((r["parameters"], _above_floor(r)) for r in own if r["variant"].startswith("d="))
        data = sorted((_samples(r), _above_floor(r)) for r in own if r["variant"].startswith("samples="))
        for name, points in (("parameters", sizes), ("samples", data)):
            usable = [(x, y) for x, y in points if y and min(y) > 0]
            if len(usable) >= 3:
                xs, ys = zip(*usable, strict=True)
                fit = check_power(xs, ys)
                about = f"{task}: exponent of {name}"
                result["fits"][f"{task}: {name}"] = fit
                # an exponent of what is no power law says nothing
                result["found"][about] = _three(fit) if fit["is_power_law"] else None
                result["lines"].append(_law(task, name, fit))
    return result


def _above_floor(row: Row) -> list[float]:
    floor = row["loss"] - row["reducible_loss"]
    return [v - floor for v in row["of_seeds"]["loss"] if v is not None]


def _samples(row: Row) -> int:
    return int(row["variant"].removeprefix("samples="))


def _three(fit: Mapping[str, Any]) -> list[float]:
    return [fit["exponent"], fit["low"], fit["high"]]


def _law(task: str, name: str, fit: Mapping[str, Any]) -> str:
    span = f"{fit['points']} points from {min(fit['x']):,} to {max(fit['x']):,}"
    misses = f"a mean is missed by up to {fit['missed']:.0%}"
    if fit["lack_of_fit"] is not None:
        misses += f", lack of fit p = {fit['lack_of_fit']:.2g}"
    local = f"between neighbours the exponent goes from {max(fit['local']):.2f} to {min(fit['local']):.2f}"
    best = min(fit["laws"], key=fit["laws"].__getitem__, default="power")
    better = f"; {best} describes it better (AICc lower by {fit['laws']['power']:.1f})" if best != "power" else ""
    if fit["is_power_law"]:
        return (
            f"{task}: the loss above its floor goes with {name} to the power of {fit['exponent']:.2f} "
            f"[{fit['low']:.2f}, {fit['high']:.2f}] over {span}; {misses}; {local}{better}"
        )
    return f"{task}: no power law of {name} over {span}: {misses}; {local}{better}"


def calibration(rows: Rows) -> dict[str, Any]:
    """Compare the expected calibration error of every variant with its base, seed by seed, with Holm over the study."""
    told: list[dict[str, Any]] = []
    for row, base in _against_base(rows):
        ours, theirs = (_known(r["of_seeds"]["calibration_error"]) for r in (row, base))
        if len(ours) == len(theirs) and ours:
            told.append(_tested(row, theirs, ours))
    _adjust(told)
    lines = [
        f"{_place(t)}: calibration error {_digits(t['value'])} against {_digits(t['base'])} of the base, "
        f"{_digits(t['difference'], signed=True)}, p Holm {t['p_holm']:.2g}: "
        f"{_direction(t, 'worse', 'better')} calibrated"
        for t in told
    ]
    return {"kind": "calibration", "rows": told, "lines": lines, "found": _differences(told, "calibration error")}


def lengths(rows: Rows) -> dict[str, Any]:
    """Compare accuracy at other lengths with that at the trained one, seed by seed, with Holm over the study."""
    told: list[dict[str, Any]] = []
    for row in rows:
        for length, values in row["of_seeds"]["lengths"].items():
            told.append({**_tested(row, row["by_seed"], values), "length": int(length)})
    _adjust(told)
    lines = []
    for row in rows:
        own = [t for t in told if _place(t) == _place(row)]
        tried = ", ".join(
            f"{_digits(t['value'])} at T = {t['length']} ({_direction(t, 'more', 'less', 'no change is seen')})"
            for t in own
        )
        lines.append(f"{_place(row)}: accuracy {row['accuracy'][0]:.3f} as trained; {tried}")
    found = {f"{_place(t)}: accuracy at T = {t['length']}": t["value"] for t in told}
    return {"kind": "lengths", "rows": told, "lines": lines, "found": found}


def entropy(rows: Rows) -> dict[str, Any]:
    """Ask whether late layers are sharper than early ones, what training does to both, how many heads are dormant."""
    told: list[dict[str, Any]] = []
    lines, found = [], {}
    for row in rows:
        # [seeds, observations, layers]
        through = np.array(row["of_seeds"]["entropy"], dtype=float)
        through = through[np.isfinite(through).all(axis=(1, 2))]
        if not len(through):
            lines.append(f"{_place(row)}: no seed has an entropy that is finite")
            continue
        first, last = through[:, -1, 0], through[:, -1, -1]
        for name, before, after in (
            ("late less early layer", first, last),
            ("early layer, end less start", through[:, 0, 0], first),
            ("late layer, end less start", through[:, 0, -1], last),
        ):
            told.append({**_tested(row, list(before), list(after)), "of": name})
        heads = _dormant(row)
        if heads is not None:
            found[f"{_place(row)}: share of dormant heads"] = _list(heads)
    _adjust(told)
    for row in rows:
        own = {t["of"]: t for t in told if _place(t) == _place(row)}
        if own:
            lines.append(_sharpness(row, own))
            share = found.get(f"{_place(row)}: share of dormant heads")
            if share:
                lines.append(
                    f"{_place(row)}: {_digits(share)} of the heads are dormant: without one, accuracy falls by less "
                    "than half a point"
                )
    found |= {f"{_place(t)}: entropy, {t['of']}": t["difference"] for t in told}
    return {"kind": "entropy", "rows": told, "lines": lines, "found": found}


def _sharpness(row: Row, own: Mapping[str, Mapping[str, Any]]) -> str:
    late = own["late less early layer"]
    what = _direction(late, "the late layer is spread more", "the late layer is sharper", "no difference is seen")
    changes = "; ".join(f"{n} {_digits(own[n]['difference'], signed=True)}" for n in own if n != late["of"])
    return (
        f"{_place(row)}: attention entropy {_digits(late['base'])} in the first layer, {_digits(late['value'])} in the "
        f"last, {_digits(late['difference'], signed=True)}, p Holm {late['p_holm']:.2g}: {what}; {changes}"
    )


def _dormant(row: Row) -> Interval | None:
    shares = [
        float(np.mean(np.array(heads["accuracy"], dtype=float) < WORTHLESS)) for heads in row["of_seeds"]["heads"]
    ]
    return mean_interval(shares) if shares else None


def shapes(rows: Rows) -> dict[str, Any]:
    """Compare depths at as many parameters in the layers: rows `N=... d=...` whose N d^2 agree to a tenth, with N = 2.

    Embeddings come on top, more of them the wider a model is; the parameters of both are told.
    """
    told: list[dict[str, Any]] = []
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for task in dict.fromkeys(r["task"] for r in rows):
        own = [(*_shape(r["variant"]), r) for r in rows if r["task"] == task]
        for depth, width, row in sorted(own, key=lambda o: o[:2]):
            curves.setdefault(task, {}).setdefault(f"N={depth}", []).append([row["parameters"], *row["accuracy"]])
            for other, other_width, base in own:
                if other == 2 != depth and abs(depth * width**2 / (2 * other_width**2) - 1) <= 0.1:
                    sizes = {"parameters": row["parameters"], "base_parameters": base["parameters"]}
                    compared = _tested(row, base["by_seed"], row["by_seed"])
                    told.append({**compared, "against": base["variant"], **sizes})
    _adjust(told)
    lines = [
        f"{_place(t)}: {_digits(t['value'])} against {_digits(t['base'])} of {t['against']} at the same N d^2 "
        f"({t['parameters']:,} parameters in all against {t['base_parameters']:,}), "
        f"{_digits(t['difference'], signed=True)}, p Holm {t['p_holm']:.2g}: {_direction(t, 'better', 'worse')}"
        for t in told
    ]
    found = {f"{_place(t)} against {t['against']}": t["difference"] for t in told}
    return {"kind": "shapes", "rows": told, "curves": curves, "lines": lines, "found": found}


def _shape(variant: str) -> tuple[int, int]:
    found = re.fullmatch(r"N=(\d+) d=(\d+)", variant)
    if found is None:
        raise ValueError(f"a variant was {variant!r}; its name must tell the shape, as N=2 d=64")
    return int(found[1]), int(found[2])


def _against_base(rows: Rows) -> Iterator[tuple[Row, Row]]:
    """Yield every row of a variant with that of its base."""
    for row in rows:
        base = next((r for r in rows if _condition(r) == _condition(row) and "difference" not in r), None)
        if base is not None and base is not row:
            yield row, base


def _condition(row: Row) -> tuple[str, str]:
    return row["task"], row["setting"]


def _place(row: Row) -> str:
    return ", ".join(part for part in (row["task"], row["setting"], row["variant"]) if part)


def _known(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None]


def _tested(row: Row, before: Sequence[float], after: Sequence[float]) -> dict[str, Any]:
    compared = Comparison.of(before, after)
    return {
        "task": row["task"], "setting": row["setting"], "variant": row["variant"],
        "base": _list(mean_interval(before)), "value": _list(mean_interval(after)),
        "difference": _list(compared.difference), "p": compared.p,
    }  # fmt: skip


def _adjust(told: Sequence[dict[str, Any]]) -> None:
    for one, p in zip(told, holm([t["p"] for t in told]), strict=True):
        one["p_holm"] = p


def _differences(told: Rows, name: str) -> dict[str, Any]:
    return {f"{_place(t)}: {name}, less the base's": t["difference"] for t in told}


def _direction(told: Mapping[str, Any], more: str, less: str, neither: str = "no evidence of being differently") -> str:
    if told["p_holm"] >= ALPHA:
        return neither
    return more if told["difference"][0] > 0 else less


def _list(interval: Interval) -> list[float | None]:
    return [v if np.isfinite(v) else None for v in (interval.value, interval.low, interval.high)]


def _digits(values: Sequence[float | None], signed: bool = False) -> str:
    """Return `value [low, high]` with two significant digits of what is small, three places else."""
    form = "{:+.3f}" if signed else "{:.3f}"
    value, low, high = ("∞" if v is None else form.format(v) for v in values)
    return f"{value} [{low if values[1] is not None else '-∞'}, {high}]"


ANSWERS: Mapping[str, Callable[[Rows], dict[str, Any]]] = {
    "calibration": calibration,
    "entropy": entropy,
    "lengths": lengths,
    "scaling-law": scaling_law,
    "shapes": shapes,
}
"""Answers by the name in `Study.fit`."""
