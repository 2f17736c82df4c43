"""What is said of parts that are varied: widths, activations, attention through training, pooling."""

from __future__ import annotations

import torch
from torch.nn import functional

from veriformer.ablations.studies.study import Variant
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.trials.recipe import Recipe
from veriformer.claims.claim import claim
from veriformer.claims.entries.bases import SMALL, narrow, short, study
from veriformer.claims.evidence import Evidence
from veriformer.claims.numbers import generator, mean_interval
from veriformer.claims.trained import apart, share
from veriformer.reference.config import Config
from veriformer.reference.counting import count_parameters
from veriformer.reference.model import build

DECODER = {**SMALL, "positions": "rotary"}


@claim(
    28,
    "d_ff of 8d instead of 4d gives a marginal gain at higher memory.",
    "A 14",
    topic="feed-forward",
    trains=True,
    derivation="The hidden activations, and the parameters of the network, double. What it buys is small where "
    "width is not what is missing.",
)  # fmt: skip
def wider_feed_forward(see: Evidence) -> None:
    tasks = ("precede", "induction")
    twice = Variant("8d", config={"d_ff": 8 * narrow(see, SMALL)["d_model"]})
    rows = see.trained(
        study(
            "d_ff",
            narrow(see, DECODER),
            short(see, Recipe(steps=300, learning_rate=3e-3, warm_up=40)),
            (Variant("4d"), twice),
            tasks,
        )
    )
    stored = see.trained(study("d_ff-memory", narrow(see, SMALL), short(see), (Variant("4d"), twice), ("memorise",)))
    for task, found in (*((t, rows) for t in tasks), ("memorise", stored)):
        see.written(
            f"accuracy of 8d less that of 4d, {task}",
            apart(found[task, "", "8d"], found[task, "", "4d"]),
            least=-0.01,
            most=0.1,
        )
    sizes = [count_parameters(Config(d_model=32, num_heads=2, d_ff=f)).total for f in (128, 256)]
    see.written("parameters of 8d over those of 4d", sizes[1] / sizes[0], least=1.3)


@claim(
    29,
    "GELU instead of ReLU gives a small gain.",
    "A 14",
    topic="feed-forward",
    trains=True,
    derivation="Both let positive inputs through and hold negative ones back; GELU is smooth at zero. Gains are "
    "reported at scale; at these sizes none is resolved.",
    corrected="At this size the difference is below three points of accuracy, either way.",
    cites="Hendrycks & Gimpel 2016; Shazeer 2020, table 2.",
)  # fmt: skip
def smooth_activation(see: Evidence) -> None:
    tasks = ("precede", "memorise")
    rows = see.trained(
        study(
            "activation",
            narrow(see, SMALL),
            short(see),
            (Variant("relu"), Variant("gelu", config={"activation": "gelu"})),
            tasks,
        )
    )
    for task in tasks:
        difference = apart(rows[task, "", "gelu"], rows[task, "", "relu"])
        see.written(f"accuracy of GELU less that of ReLU, {task}", difference, least=1e-4)
        see.corrected(f"accuracy of GELU less that of ReLU, {task}", difference, least=-0.03, most=0.03)


@claim(
    33,
    "Attention entropy is higher in early layers and lower in late ones; heads focus through training, some go "
    "dormant.",
    "A 11", "A 14",
    topic="attention",
    trains=True,
    formula=r"H = -\sum_j \alpha_j \log \alpha_j",
    derivation="Entropy falls through training where keys must be told apart. Nothing in the architecture says which "
    "layers do so: that the early ones stay more diffuse is found, not proved. A head is called dormant here when its "
    "entropy ends above 0.98 of ln T. Heads of one model are no independent samples, so models are counted.",
    corrected="Entropy is higher in early layers and heads focus through training; at this size most models end "
    "without a dormant head.",
    cites="Clark et al. 2019, figure 5.",
)  # fmt: skip
def entropy(see: Evidence) -> None:
    rows = see.trained(
        study(
            "entropy",
            {**narrow(see, SMALL), "num_layers": 4, "num_heads": 4},
            short(see, Recipe(steps=300, learning_rate=2e-3, warm_up=30)),
            (Variant("pre-LN"),),
            ("precede",),
        )
    )
    curves = torch.tensor(
        [r["curves"]["entropy"] for r in rows["precede", "", "pre-LN"].records], dtype=torch.float64
    )  # [seeds, step, layer, head]
    by_layer = curves[:, -1].mean(-1)
    see.show("entropy over ln T by layer, at the end", by_layer.mean(0).tolist())
    late = mean_interval(by_layer[:, :2].mean(1) - by_layer[:, 2:].mean(1))
    fell = mean_interval(curves[:, 0].mean((1, 2)) - curves[:, -1].mean((1, 2)))
    some = (curves[:, -1] > DORMANT).flatten(1).any(1)
    dormant = share(int(some.sum()), len(some))
    for say in (see.written, see.corrected):
        say("entropy over ln T of the first two layers less that of the last two", late, least=0.0)
        say("fall of the entropy through training, all heads", fell, least=0.0)
    see.written(f"share of models in which a head's entropy ends above {DORMANT} of ln T", dormant, least=MOST)
    see.corrected(f"share of models in which a head's entropy ends above {DORMANT} of ln T", dormant, most=MOST)


DORMANT, MOST = 0.98, 0.5
"""Entropy over ln T above which a head attends to all alike; the share of models above which it is the rule."""

PROBED = ("count", "first", "precede", "bigram")


@claim(
    34,
    "Mean pooling is a strong default; the class token needs training to work.",
    "A 10",
    topic="pooling",
    trains=True,
    derivation="Untrained attention is near uniform, so the class token's output is itself plus about the mean of "
    "the others' values: a linear map on top of a frozen random encoder reads as much from it as from the mean. "
    "Trained, both solve what the mean solves.",
    corrected="Mean pooling is a strong default; the class token works as well when trained, and even a frozen "
    "random encoder gathers as much in it as in the mean.",
)  # fmt: skip
def pooling(see: Evidence) -> None:
    seeds = see.seeds()
    gains = torch.tensor(
        [[_probed(t, "mean", s) - _probed(t, "cls", s) for t in PROBED] for s in seeds], dtype=torch.float64
    )
    gain = mean_interval(gains.mean(1))
    see.written(
        "accuracy of a linear map on a frozen random encoder, mean less class token, four tasks", gain, least=0.05
    )
    see.corrected(
        "accuracy of a linear map on a frozen random encoder, mean less class token, four tasks", gain, most=0.05
    )
    rows = see.trained(
        study(
            "pooling",
            narrow(see, SMALL),
            short(see),
            (Variant("mean"), Variant("cls", config={"pooling": "cls"})),
            ("majority",),
        )
    )
    elsewhere = see.trained(
        study("pooling-order", narrow(see, SMALL), short(see), (Variant("mean"),), ("precede", "count"))
    )
    for task, found in (("majority", rows), ("precede", elsewhere), ("count", elsewhere)):
        of_mean = mean_interval(found[task, "", "mean"].accuracy)
        see.written(f"accuracy of the mean, trained, {task}", of_mean, least=0.95)
        see.corrected(f"accuracy of the mean, trained, {task}", of_mean, least=0.95)
    of_token = mean_interval(rows["majority", "", "cls"].accuracy)
    see.corrected("accuracy of the class token, trained, majority", of_token, least=0.95)


def _probed(name: str, pooling: str, seed: int) -> float:
    """Return the accuracy, on new samples, of a ridge regression on what an untrained encoder pools."""
    task = TASKS[name]
    model = build(
        Config(
            **{
                **SMALL,
                "architecture": "classifier",
                "vocab_size": task.vocab_size,
                "num_classes": 32,  # type: ignore[arg-type]
                "pooling": pooling,
            }
        ),
        generator(seed),
    ).eval()
    train, test = task.draw(seed, 300), task.draw(seed + 10_000, 300)
    with torch.no_grad():
        features = [model(s.inputs[0]).double() for s in (train, test)]
    design = [torch.cat([f, torch.ones(len(f), 1, dtype=torch.float64)], 1) for f in features]
    wanted = functional.one_hot(train.labels, task.num_classes).double()
    gram = design[0].T @ design[0]
    weights = torch.linalg.solve(gram + 1e-3 * gram.trace() / len(gram) * torch.eye(len(gram)), design[0].T @ wanted)
    return ((design[1] @ weights).argmax(1) == test.labels).double().mean().item()
