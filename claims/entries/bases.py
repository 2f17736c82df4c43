"""Configurations and recipes that claims on training share, and what a quick run makes of them.

A quick run asks the same of narrower models, in fewer steps, and trains rows as one stack where it can; what it has too
few seeds or steps for comes out undecided by the usual rule. Nothing here changes what a full run trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from veriformer.ablations.studies.study import Setting, Study, Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.evidence import Evidence
from veriformer.claims.trained import Row

SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 2, "positions": "learned"}
DEEP = {"num_layers": 6, "d_model": 32, "num_heads": 2, "positions": "learned"}
SHORT = Recipe(steps=200, learning_rate=3e-3, warm_up=20)
LONG = Recipe(steps=300, learning_rate=3e-3, warm_up=125)
NO_EFFECT = 0.02
"""Two points of accuracy: smaller differences of means are called none."""

NARROW = 16
"""Width of a quick run: six layers learn which token comes first in as many steps as at 32, for half the time."""

FEW = 3
"""Seeds of quick rows that cost most: enough for an interval, seldom for a share."""

_WIDE_RATES = {"pre": (3e-3,), "post": (3e-3, 5e-4)}
_QUICK_RATES = {"pre": (3e-3, 1e-3), "post": (3e-3, 5e-4)}


def study(
    name: str,
    config: Mapping[str, Any],
    recipe: Recipe,
    variants: tuple[Variant, ...],
    tasks: tuple[str, ...],
    settings: tuple[Setting, ...] = (Setting(),),
    lengths: tuple[int, ...] = (),
) -> Study:
    """Return a study of a claim; its rows are read by the claim alone."""
    return Study(
        name=name,
        question="",
        source="",
        config=config,
        recipe=recipe,
        variants=variants,
        tasks=tasks,
        settings=settings,
        lengths=lengths,
    )


def narrow(see: Evidence, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration, of the quick width in a quick run."""
    return {**config, "d_model": NARROW} if see.quick else dict(config)


def short(see: Evidence, recipe: Recipe = SHORT, **fewer: Any) -> Recipe:
    """Return the recipe, with these fields exchanged in a quick run; without any, of 150 steps then."""
    return replace(recipe, **(fewer or {"steps": 150})) if see.quick else recipe


def deep(see: Evidence, **fields: Any) -> Recipe:
    """Return the recipe of six layers: 300 steps, or 200 of half the batch in a quick run; with `fields` exchanged."""
    return replace(short(see, LONG, steps=200, warm_up=60, batch_size=16), **fields)


def with_and_without_warm_up(see: Evidence) -> dict[tuple[str, str, str], Row]:
    """Return rows of six layers with and without warm-up, by place of the norm and rate.

    A quick run has all rates of a place in one stack, and claims 24 to 26 read their bases there.
    """
    rates = _QUICK_RATES if see.quick else _WIDE_RATES
    settings = tuple(
        Setting(
            f"{place} {rate:g}",
            {"norm_placement": place},
            {"learning_rate": rate} | ({} if see.quick else {"steps": 600 if rate == 5e-4 else 300}),
        )
        for place in rates
        for rate in rates[place]
    )
    variants = (Variant("with"), Variant("without", recipe={"warm_up": 0}))
    of_places = study("warm-up", narrow(see, DEEP), deep(see), variants, ("precede",), settings)
    return see.trained(of_places, see.seeds(few=FEW))
