"""What is said of the training recipe: label smoothing, mixed precision, clipping, DropPath."""

from __future__ import annotations

import torch

from veriformer.ablations.studies.study import Variant
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.claim import claim
from veriformer.claims.entries.bases import DEEP, SMALL, deep, narrow, short, study
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import mean_interval
from veriformer.claims.trained import apart, share
from veriformer.reference.objectives import cross_entropy

FINITE = Recipe(steps=300, learning_rate=2e-3, warm_up=20, num_samples=64)
"""Few samples, gone through 150 times: here a model overfits."""

NONE = 0.02
"""Two points of probability: a mean confidence this near the accuracy is called right."""


@claim(
    30,
    "Label smoothing prevents overconfidence.",
    "A 14", "C Implementation",
    topic="training",
    trains=True,
    derivation="Smoothed targets have their optimum at a confidence of 1 - eps + eps/K. A model that is right every "
    "time needs no holding back and becomes too modest. One that overfits few samples is too sure of what it has not "
    "seen; smoothing caps its confidence near 1 - eps, while its accuracy may be far lower: it stays too sure. "
    "Overconfidence is the mean confidence less the accuracy; the calibration error has no sign and would take "
    "modesty for it.",
    corrected="Label smoothing lessens overconfidence and does not end it: a model that overfits 64 samples stays too "
    "sure; where there is none to prevent, it makes the model too modest.",
    cites="Szegedy et al. 2016, section 7; Müller et al. 2019.",
)  # fmt: skip
def label_smoothing(see: Evidence) -> None:
    def over(record: dict[str, float]) -> float:
        return record["overconfidence"]

    variants = (Variant("hard"), Variant("smoothed", recipe={"label_smoothing": 0.1}))
    endless = see.trained(study("smoothing", narrow(see, SMALL), short(see), variants, ("precede",)))
    few = short(see, FINITE)
    finite = see.trained(study("smoothing-few-samples", narrow(see, SMALL), few, variants, ("bigram",)))
    hard, smoothed = (finite["bigram", "", name] for name in ("hard", "smoothed"))
    still = mean_interval(smoothed.values(over))
    see.written("confidence less accuracy with smoothing, 64 samples", still, most=NONE)
    see.corrected("confidence less accuracy with smoothing, 64 samples", still, least=NONE)
    see.corrected("the same without smoothing", mean_interval(hard.values(over)), least=NONE)
    see.corrected("with smoothing less without, 64 samples", apart(smoothed, hard, over), most=0.0)
    see.corrected("gradient of the smoothed loss at confidence 1 - eps + eps/K", _gradient_at_best(), most=1e-12)
    modest = mean_interval(endless["precede", "", "smoothed"].values(over))
    see.corrected("confidence less accuracy with smoothing, endless data", modest, most=-NONE)


def _gradient_at_best(eps: float = 0.1, classes: int = 4) -> float:
    """Return the largest gradient of the smoothed loss where the label has probability 1 - eps + eps/K."""
    best = torch.full((1, classes), eps / classes, dtype=torch.float64)
    best[0, 0] += 1 - eps
    logits = best.log().requires_grad_()
    loss = cross_entropy(logits, torch.tensor([0]), label_smoothing=eps)
    return torch.autograd.grad(loss, logits)[0].abs().max().item()


@claim(
    64,
    "Mixed precision costs little accuracy.",
    "C Implementation",
    topic="training",
    trains=True,
    derivation="Products round in bfloat16, sums and the optimiser stay in float32. (The lecture names float16, whose "
    "small range needs a scaled loss besides; processors without a graphics card compute in bfloat16.)",
    cites="Micikevicius et al. 2018.",
)  # fmt: skip
def mixed_precision(see: Evidence) -> None:
    tasks = ("precede", "count")
    rows = see.trained(
        study(
            "precision",
            narrow(see, SMALL),
            short(see),
            (Variant("float32"), Variant("autocast", recipe={"autocast": True})),
            tasks,
        )
    )
    for task in tasks:
        see.written(
            f"accuracy under bfloat16 autocast less that in float32, {task}",
            apart(rows[task, "", "autocast"], rows[task, "", "float32"]),
            least=-0.03,
            most=0.03,
        )


@claim(
    65,
    "Clipping the gradient at norm 1 prevents instability.",
    "C Implementation",
    topic="training",
    trains=True,
    derivation="Clipping bounds the gradient, not the step: Adam divides by the gradient's own size, so a factor "
    "on all gradients changes nothing. It helps against single large gradients, not against a model whose scale "
    "runs away.",
    corrected="With Adam it does not: a model without LayerNorm at a large rate still loses seeds to spikes and "
    "chance.",
    cites="Pascanu et al. 2013; Kingma & Ba 2015, section 2.1 (invariance to the gradient's scale).",
)  # fmt: skip
def clipping(see: Evidence) -> None:
    clipped = Variant("clipped", recipe={"clip": 1.0})
    rows = see.trained(
        study(
            "clipping",
            {**narrow(see, DEEP), "norm": "none"},
            deep(see, warm_up=0, steps=250) if see.quick else Recipe(steps=300, learning_rate=3e-3),
            (clipped,) if see.quick else (Variant("free"), clipped),
            ("precede",),
        )
    )
    unstable = {}
    for _, _, name in rows:
        records = rows["precede", "", name].records
        unstable[name] = share(sum(r["spikes"] > 0 or r["accuracy"] < 0.9 for r in records), len(records))
    if "free" in unstable:
        see.show("share of unstable seeds without clipping", unstable["free"])
    see.written("share of seeds with a spike or without success, no LayerNorm, clipped", unstable["clipped"], most=0.25)
    see.corrected(
        "share of seeds with a spike or without success, no LayerNorm, clipped", unstable["clipped"], least=0.25
    )


@claim(
    66,
    "DropPath regularises.",
    "C Implementation",
    topic="training",
    trains=True,
    derivation="A dropped sublayer makes the network an ensemble of shallower ones; with few samples that holds "
    "back what is learned by heart.",
    cites="Huang et al. 2016.",
)  # fmt: skip
def drop_path(see: Evidence) -> None:
    rows = see.trained(
        study(
            "DropPath",
            {**narrow(see, SMALL), "num_layers": 2 if see.quick else 4},
            short(see, FINITE),
            (Variant("none"), Variant("0.2", config={"drop_path": 0.2})),
            ("bigram",),
        )
    )
    one, other = rows["bigram", "", "0.2"], rows["bigram", "", "none"]

    def loss(record: dict[str, float]) -> float:
        return record["loss"]

    see.written(
        "held-out loss with DropPath 0.2 less that without, 64 samples, nats", apart(one, other, loss), most=0.0
    )
