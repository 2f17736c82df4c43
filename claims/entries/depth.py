"""What is said of depth, width, data and the norm that closes a stack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from veriformer.ablations.statistics.fits import fit_power
from veriformer.ablations.studies.study import Variant
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.claim import claim
from veriformer.claims.entries.bases import DEEP, FEW, NO_EFFECT, deep, narrow, study, with_and_without_warm_up
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import generator, mean_interval
from veriformer.claims.trained import Row, apart
from veriformer.reference.config import Config
from veriformer.reference.counting import count_parameters
from veriformer.reference.model import build


@claim(
    31,
    "Depth matters more than width: N = 6 beats N = 2 even with three times the parameters a layer.",
    "A 12", "A Ex. 3",
    topic="size",
    trains=True,
    derivation="Composing functions takes layers in sequence, but a function applied twice needs two of them; storing "
    "facts takes parameters anywhere. Compared at equal parameters: 6 layers of d = 32 against 2 of d = 56, three "
    "times as many a layer.",
    corrected="At this size and budget two wide layers are as good on facts and better on a function applied twice.",
    cites="Tay et al. 2022; Levine et al. 2020.",
)  # fmt: skip
def depth_or_width(see: Evidence) -> None:
    deep: dict[str, Any] = {"num_layers": 6, "d_model": 32, "num_heads": 4}
    wide: dict[str, Any] = {"num_layers": 2, "d_model": 56, "num_heads": 4}
    counts = [count_parameters(Config(architecture="decoder", vocab_size=11, **c)).total for c in (deep, wide)]
    for say in (see.written, see.corrected):
        say("parameters of the deep model over those of the wide one", counts[0] / counts[1], least=0.9, most=1.1)
    recipe = Recipe(steps=60 if see.quick else 400, learning_rate=2e-3, warm_up=40, batch_size=32)
    rows = see.trained(
        study(
            "depth-or-width",
            {"positions": "rotary"},
            recipe,
            (Variant("N=6", config=deep), Variant("N=2", config=wide)),
            ("hops", "memorise"),
        ),
        see.seeds(few=FEW),
    )
    difference = {t: apart(rows[t, "", "N=6"], rows[t, "", "N=2"]) for t in ("hops", "memorise")}
    twice = "accuracy of N = 6 less that of N = 2 at equal parameters, a function applied twice"
    see.written(twice, difference["hops"], least=NO_EFFECT)
    see.corrected(twice, difference["hops"], most=0.0)
    see.corrected("the same, a table of 256 facts", difference["memorise"], least=-NO_EFFECT, most=NO_EFFECT)


@claim(
    32,
    "Beyond N = 6 more depth gives diminishing returns.",
    "A 12",
    topic="size",
    trains=True,
    derivation="A task of two compositions asks for few layers: what 12 could add over 6 is bounded by what 6 "
    "leave.",
)  # fmt: skip
def diminishing(see: Evidence) -> None:
    variants = tuple(Variant(f"N={n}", config={"num_layers": n}) for n in (2, 6, 12))
    rows = see.trained(
        study(
            "depth",
            {"positions": "rotary", "d_model": 32, "num_heads": 4},
            Recipe(steps=60 if see.quick else 400, learning_rate=2e-3, warm_up=40),
            variants,
            ("hops",),
        ),
        see.seeds(few=FEW),
    )
    two, six, twelve = (rows["hops", "", f"N={n}"].accuracy for n in (2, 6, 12))
    see.show("accuracy", {"N=2": two.mean().item(), "N=6": six.mean().item(), "N=12": twelve.mean().item()})
    see.written(
        "gain from 2 to 6 layers less that from 6 to 12", mean_interval((six - two) - (twelve - six)), least=0.0
    )


@claim(
    41,
    "The loss follows power laws in size and in data.",
    "A 8.3",
    topic="size",
    trains=True,
    formula=r"L - L_\infty \propto N^{-\alpha}",
    derivation="On a synthetic source of known entropy the loss above it is fitted by a power of the samples seen; "
    "the fit must hold point by point, not only slope downwards. A small source is soon known wholly: then the loss "
    "falls faster than any power.",
    corrected="Not of every source: on one that can be learned wholly the loss falls with data faster and faster, and "
    "no single power fits.",
    cites="Kaplan et al. 2020, equations 1.1 and 1.2.",
)  # fmt: skip
def scaling(see: Evidence) -> None:
    samples = (320, 800, 2000, 5000)
    config = narrow(see, {"num_layers": 2, "d_model": 32, "num_heads": 2, "positions": "rotary"})
    recipe = Recipe(learning_rate=3e-3, schedule="cosine", batch_size=16)
    variants = tuple(Variant(f"{n}", recipe={"steps": n // 16, "warm_up": n // 160}) for n in samples)
    rows = see.trained(study("scaling", config, recipe, variants, ("source",)), see.seeds(few=FEW))
    floor = TASKS["source"].loss_floor

    def above(row: Row) -> float:
        return row.values(lambda r: r["loss"]).mean().item() - floor

    losses = [above(rows["source", "", f"{n}"]) for n in samples]
    see.show("loss above the entropy, nats", {"samples": list(samples), "loss": losses})
    off = _off_the_line(samples, losses)
    see.written("largest distance of a point to the fitted power of the data, in logarithms", off, most=0.1)
    see.corrected("largest distance of a point to the fitted power of the data, in logarithms", off, least=0.1)
    widths = (8, 16, 32) if see.quick else (8, 16, 32, 64)
    sizes = see.trained(
        study(
            "scaling-size",
            config,
            replace(recipe, steps=125, warm_up=12),
            tuple(Variant(f"{d}", config={"d_model": d}) for d in widths),
            ("source",),
        ),
        see.seeds(few=FEW),
    )
    counts = [
        count_parameters(Config(architecture="decoder", vocab_size=16, **{**config, "d_model": d})).total
        for d in widths
    ]
    by_size = [above(sizes["source", "", f"{d}"]) for d in widths]
    see.show("loss above the entropy by size, nats", {"parameters": counts, "loss": by_size})
    see.written(
        "largest distance of a point to the fitted power of the size, in logarithms",
        _off_the_line(counts, by_size),
        most=0.1,
    )
    few, many = (rows["source", "", f"{n}"].values(lambda r: r["loss"]) for n in (samples[0], samples[-1]))
    see.corrected(
        f"loss at {samples[0]} samples less that at {samples[-1]}, nats", mean_interval(few - many), least=0.0
    )


def _off_the_line(sizes: Sequence[float], losses: list[float]) -> float:
    """Return the largest distance of a loss to the power law fitted to all, in logarithms."""
    fit = fit_power(list(map(float, sizes)), losses)
    return max(abs(math.log(y / (fit["factor"] * x ** fit["exponent"]))) for x, y in zip(sizes, losses, strict=True))


@claim(
    24,
    "Pre-LN needs a final LayerNorm, post-LN does not.",
    "A 4.5",
    topic="norms",
    trains=True,
    derivation="A pre-LN stream grows with depth and reaches the head unnormalised; post-LN's last layer ends in a "
    "norm. A head can live with a stream of any fixed scale, so 'needs' is a matter of degree.",
    corrected="Pre-LN trains without it too at this size; its stream is not of unit scale then.",
    cites="Xiong et al. 2020, section 3.1.",
)  # fmt: skip
def closing_norm(see: Evidence) -> None:
    variants = (Variant("with"), Variant("without", edits=("no closing norm",)))
    if see.quick:
        recipe, there = deep(see, learning_rate=1e-3), with_and_without_warm_up(see)["precede", "pre 0.001", "with"]
        bare = study("closing-norm", narrow(see, DEEP), recipe, variants[1:], ("precede",))
        rows = see.trained(bare, see.seeds(few=FEW))
        rows["precede", "", "with"] = there
    else:
        recipe = Recipe(steps=300, learning_rate=1e-3, warm_up=30)
        rows = see.trained(study("closing-norm", {**DEEP, "num_layers": 6}, recipe, variants, ("precede",)))
    lost = apart(rows["precede", "", "with"], rows["precede", "", "without"])
    see.written("accuracy that pre-LN loses without the closing norm", lost, least=NO_EFFECT)
    see.corrected("accuracy that pre-LN loses without the closing norm", lost, most=NO_EFFECT)
    scales = {
        where: mean_interval(torch.tensor([_stream(where, s) for s in see.seeds(few=12)])) for where in ("pre", "post")
    }
    see.corrected("standard deviation of the stream after 12 pre-LN layers", scales["pre"], least=1.5)
    see.corrected("the same, post-LN", scales["post"], least=0.99, most=1.01)


def _stream(placement: str, seed: int) -> float:
    draw = generator(seed)
    model = build(Config(num_layers=12, d_model=32, norm_placement=placement, embedding_scale=False), draw).double()
    with torch.no_grad():
        x = torch.randn(2, 16, 32, generator=draw, dtype=torch.float64)
        for layer in model.stack.layers:  # type: ignore[union-attr]
            x, _ = layer(x)
    return x.std().item()
