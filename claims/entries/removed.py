"""What is said of training when a part is removed or moved: positions, residual connections, norms, warm-up."""

from __future__ import annotations

import math
from dataclasses import replace

from veriformer.ablations.studies.study import Setting, Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.claim import claim
from veriformer.claims.entries.bases import (
    DEEP,
    FEW,
    NO_EFFECT,
    SHORT,
    SMALL,
    deep,
    narrow,
    short,
    study,
    with_and_without_warm_up,
)
from veriformer.claims.evidence import Evidence
from veriformer.claims.trained import SEEDS, TUNING, Row, apart, share


@claim(
    8,
    "Learned positions match sinusoidal ones in accuracy.",
    "A 3.3", "A Ex. 1",
    topic="positions",
    trains=True,
    derivation="At lengths that were trained both give every position a vector of its own, and the network learns "
    "to read it.",
    cites="Vaswani et al. 2017, table 3, row E.",
)  # fmt: skip
def learned_positions(see: Evidence) -> None:
    rows = see.trained(
        study(
            "learned",
            narrow(see, SMALL),
            short(see) if see.quick else replace(SHORT, steps=600),
            (Variant("learned"), Variant("sinusoidal", config={"positions": "sinusoidal"})),
            ("precede", "bigram"),
        )
    )
    for task in ("precede", "bigram"):
        difference = apart(rows[task, "", "learned"], rows[task, "", "sinusoidal"])
        see.written(
            f"accuracy of learned less that of sinusoidal positions, {task}",
            difference,
            least=-NO_EFFECT,
            most=NO_EFFECT,
        )


@claim(
    22,
    "Post-LN needs warm-up critically, pre-LN less or not at all.",
    "A 4.5", "C 3", "D 3.4",
    topic="norms",
    trains=True,
    derivation="At the start the gradient of post-LN's last layers is of order one whatever the depth, and Adam's "
    "first steps have the size of the rate: a large rate moves them too far. A small enough rate needs no warm-up.",
    condition="the learning rate is large (3e-3 here, not 5e-4)",
    cites="Xiong et al. 2020, section 3.",
)  # fmt: skip
def warm_up(see: Evidence) -> None:
    rows = with_and_without_warm_up(see)
    dead = {
        (place, way): rows["precede", place, way].dead()
        for place in ("pre 0.003", "post 0.003", "post 0.0005")
        for way in ("with", "without")
    }
    see.restricted(
        "share of post-LN seeds that end at chance without warm-up, rate 3e-3",
        dead["post 0.003", "without"],
        least=0.25,
    )
    see.restricted(
        "accuracy that warm-up buys post-LN, rate 3e-3",
        apart(rows["precede", "post 0.003", "with"], rows["precede", "post 0.003", "without"]),
        least=0.1,
    )
    see.restricted(
        "share of pre-LN seeds that end at chance without warm-up, rate 3e-3", dead["pre 0.003", "without"], most=0.6
    )
    see.restricted(
        "accuracy that warm-up buys pre-LN, rate 3e-3",
        apart(rows["precede", "pre 0.003", "with"], rows["precede", "pre 0.003", "without"]),
        most=0.1,
    )
    see.written(
        "accuracy that warm-up buys post-LN, rate 5e-4",
        apart(rows["precede", "post 0.0005", "with"], rows["precede", "post 0.0005", "without"]),
        least=0.1,
    )


@claim(
    23,
    "Post-LN ends slightly better than pre-LN when it is trained carefully.",
    "A 4.5", "D 3.4",
    topic="norms",
    trains=True,
    derivation="Reported for translation with tuned warm-up. Here a language of known entropy is learned with "
    "warm-up and a decaying rate. The best of three rates is chosen for each on seeds of their own; then the losses "
    "are compared at these rates, seed by seed, on four times as many seeds as elsewhere, since the difference is "
    "small.",
    cites="Liu et al. 2020 (Understanding the difficulty of training Transformers), table 2.",
    corrected="At this size pre-LN with its best rate is as good as post-LN with its own, to 0.05 nats.",
)  # fmt: skip
def final_quality(see: Evidence) -> None:
    rates = (2e-3,) if see.quick else (1e-3, 2e-3, 4e-3)
    recipe = short(see, Recipe(steps=300, warm_up=100, schedule="cosine", batch_size=16), steps=120, warm_up=40)
    config = {**narrow(see, SMALL), "num_layers": 2 if see.quick else 4, "positions": "rotary"}

    def loss(record: dict[str, float]) -> float:
        return record["loss"]

    def of(place: str, chosen: tuple[float, ...], seeds: range) -> dict[float, Row]:
        settings = tuple(Setting(f"{r:g}", recipe={"learning_rate": r}) for r in chosen)
        variant = Variant(place, config={"norm_placement": place})
        rows = see.trained(study("final-quality", config, recipe, (variant,), ("source",), settings), seeds)
        return {r: rows["source", f"{r:g}", place] for r in chosen}

    best = {}
    for place in ("pre", "post"):
        rate = rates[0]
        if len(rates) > 1:
            tuned = of(place, rates, TUNING)
            rate = min(rates, key=lambda r: tuned[r].values(loss).mean().item())
        see.show(f"best rate of {place}-LN", rate)
        best[place] = of(place, (rate,), see.seeds(4 * SEEDS, few=FEW))[rate]
    difference = apart(best["post"], best["pre"], loss)
    see.written("held-out loss of post-LN less that of pre-LN, each at its best rate, nats", difference, most=0.0)
    see.corrected("the same", difference, least=-0.05, most=0.05)


@claim(
    25,
    "Without residual connections depth beyond about two layers hardly trains; training collapses for N > 2.",
    "A 4.3", "A 14",
    topic="residual",
    trains=True,
    derivation="Attention alone pulls tokens together: rank collapses doubly exponentially with depth (Dong et al. "
    "2021). Whether training gets out of it depends on the rate and the norm.",
    condition="the depth is 6 and the rate 3e-3; one layer at that rate does without, and so do three at 1e-3",
    cites="Dong et al. 2021, theorem 2.1.",
)  # fmt: skip
def without_residual(see: Evidence) -> None:
    tried = ((1, 3e-3), (3, 1e-3), (6, 3e-3)) if see.quick else ((1, 3e-3), (3, 1e-3), (3, 3e-3), (6, 3e-3))
    settings = tuple(Setting(f"N={n} {r:g}", {"num_layers": n}, {"learning_rate": r}) for n, r in tried)
    of_depths = study(
        "residual",
        narrow(see, DEEP),
        deep(see),
        (Variant("with"), Variant("without", config={"residual": False})),
        ("precede",),
        settings,
    )
    there = {}
    if see.quick:
        of_depths = replace(of_depths, skip=lambda task, setting, variant: (setting, variant) == ("N=6 0.003", "with"))
        there = {("precede", "N=6 0.003", "with"): with_and_without_warm_up(see)["precede", "pre 0.003", "with"]}
    rows = see.trained(of_depths, see.seeds(few=FEW)) | there
    lost = {s.name: apart(rows["precede", s.name, "with"], rows["precede", s.name, "without"]) for s in settings}
    see.show("mean accuracy lost by depth and rate", {name: round(sum(ends) / 2, 4) for name, ends in lost.items()})
    see.written("accuracy lost without residual connections, N = 3, rate 1e-3", lost["N=3 0.001"], least=0.1)
    see.restricted("accuracy lost without residual connections, N = 6, rate 3e-3", lost["N=6 0.003"], least=0.1)
    see.restricted("share of seeds at chance there", rows["precede", "N=6 0.003", "without"].dead(), least=0.1)
    see.restricted("accuracy lost without residual connections, N = 1, rate 3e-3", lost["N=1 0.003"], most=NO_EFFECT)


@claim(
    26,
    "Without LayerNorm training is unstable and the loss spikes.",
    "A 14",
    topic="norms",
    trains=True,
    derivation="The stream's scale is bounded by nothing, and a step throws it far; at a sixth of the rate too. Small "
    "initial weights and a warm-up are another remedy: where they keep the loss from rising, the norm was not what was "
    "needed. That is said of the way, not of the end: at its best setting such a model is as good (see the table of "
    "parts removed).",
    condition="the weights are drawn by Xavier's rule (not small ones, as GPT-2's, with a warm-up)",
    cites="Zhang et al. 2019 (Fixup).",
)  # fmt: skip
def without_norm(see: Evidence) -> None:
    bare = {"norm": "none"}
    slow = {"learning_rate": 5e-4, "warm_up": 30}
    variants = (
        Variant("LayerNorm"),
        Variant("none", config=bare),
        Variant("none, rate 5e-4", config=bare, recipe=slow),
        Variant("none, GPT-2 init", config={**bare, "init": "gpt2"}, recipe={"warm_up": 125}),
    )
    recipe = Recipe(steps=300, learning_rate=3e-3)
    if see.quick:
        recipe, there = (
            deep(see, warm_up=0, steps=150),
            with_and_without_warm_up(see)["precede", "pre 0.003", "without"],
        )
        # three seeds can put no share on either side of 0.3, five can
        rows = see.trained(study("norm", narrow(see, DEEP), recipe, variants[1:], ("precede",)))
        rows["precede", "", "LayerNorm"] = there
    else:
        rows = see.trained(study("norm", DEEP, recipe, variants, ("precede",)))
    limit = 10 * math.log(2)  # ten times the loss of guessing
    spiked = {}
    for variant in variants:
        records = rows["precede", "", variant.name].records
        spiked[variant.name] = share(sum((r["max_loss"] or math.inf) > limit for r in records), len(records))
    for say in (see.written, see.restricted):
        say("share of seeds whose loss rises to ten times that of guessing, no LayerNorm, rate 3e-3",
            spiked["none"], least=0.3)  # fmt: skip
        say("the same with LayerNorm", spiked["LayerNorm"], most=0.3)
        say("the same without LayerNorm, rate 5e-4 with a warm-up", spiked["none, rate 5e-4"], least=0.3)
    see.written("the same, GPT-2's initialisation, rate 3e-3 with a warm-up", spiked["none, GPT-2 init"], least=0.3)
    see.show("accuracy without LayerNorm, rate 3e-3, GPT-2's initialisation and a warm-up",
             rows["precede", "", "none, GPT-2 init"].accuracy.tolist())  # fmt: skip


@claim(
    27,
    "Removing positional encoding lowers accuracy, because order cannot be seen.",
    "A 14",
    topic="positions",
    trains=True,
    derivation="An encoder without positions is permutation-equivariant: where the label depends on order it is at "
    "chance exactly. Where it does not, nothing is lost. A causal mask tells some order by itself.",
    condition="the task depends on order",
    cites="Lee et al. 2019; Haviv et al. 2022 for causal models.",
)  # fmt: skip
def without_positions(see: Evidence) -> None:
    rows = see.trained(
        study(
            "positions",
            narrow(see, SMALL),
            short(see),
            (Variant("learned"), Variant("none", config={"positions": "none"})),
            ("precede", "count"),
        )
    )
    lost = {t: apart(rows[t, "", "learned"], rows[t, "", "none"]) for t in ("precede", "count")}
    see.restricted("accuracy lost on which of two tokens comes first", lost["precede"], least=0.4)
    see.restricted("share of seeds at chance there", rows["precede", "", "none"].dead(), least=0.4)
    see.written("accuracy lost on counting a token", lost["count"], least=NO_EFFECT)
