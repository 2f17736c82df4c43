"""How a model is trained and what becomes of it: recipe, regularisers, objective, entropy, scaling laws, views."""

from __future__ import annotations

import math

from veriformer.ablations.studies.core import SMALL
from veriformer.ablations.studies.study import Expectation, Prediction, Study, Variant, register
from veriformer.ablations.tasks.facts import ZIPF
from veriformer.ablations.tasks.masked import LENGTH, STATES
from veriformer.ablations.trials.recipe import Recipe

WORSE, BETTER = (1e-9, math.inf), (-math.inf, -1e-9)
"""Differences of a calibration error: larger or smaller than the base's."""


def _samples(number: int) -> Variant:
    """Return the variant that sees each of `number` samples once, so that data and steps go together."""
    return Variant(
        f"samples={number}", f"(1280 samples, for {number})", recipe={"steps": number // 64, "warm_up": number // 640}
    )


register(
    Study(
        name="recipe",
        question="What do the parts of the training recipe buy?",
        source="Szegedy et al. 2016; Müller et al. 2019; Micikevicius et al. 2018; Pascanu et al. 2013",
        # more facts than the model can learn in these steps: nothing is at the ceiling
        config={**SMALL, "num_layers": 1},
        recipe=Recipe(steps=400, batch_size=256, learning_rate=3e-3, warm_up=40),
        variants=(
            Variant("plain"),
            Variant("label smoothing 0.1", "hard targets", recipe={"label_smoothing": 0.1}),
            Variant("clipping 1", "gradients longer than 1", recipe={"clip": 1.0}),
            Variant("no warm-up", "the first 40 small steps", recipe={"warm_up": 0}),
            Variant("cosine", "the constant rate", recipe={"schedule": "cosine"}),
            Variant("init GPT-2", "Xavier, for N(0, 0.02^2)", {"init": "gpt2"}),
            Variant("init torch", "Xavier, for torch's default", {"init": "default"}),
            Variant("beta2 0.95", "0.999", recipe={"beta2": 0.95}),
            Variant("bfloat16 autocast", "float32 products", recipe={"autocast": True}),
        ),
        tasks=("facts",),
        fit="calibration",
        predictions=(
            Prediction("cosine", "helps", "Loshchilov & Hutter 2017, section 4", registered="2026-11-23"),
            Prediction("bfloat16 autocast", "alike", "Kalamkar et al. 2019: as float32", registered="2026-11-23"),
            Prediction("clipping 1", "alike", "Pascanu et al. 2013: clips what explodes, and nothing does",
                       registered="2026-11-23"),
        ),
        expectations=(
            Expectation("facts, label smoothing 0.1: calibration error, less the base's", *WORSE,
                        "Müller et al. 2019, section 3: confidence falls, here from where nothing overfits",
                        registered="2026-11-23"),
        ),
    ),
    Study(
        name="regularisers",
        question="What do regularisers buy where there is something to overfit: few samples, one label in ten wrong?",
        source="Srivastava et al. 2014; Huang et al. 2016; Szegedy et al. 2016; Guo et al. 2017",
        config={**SMALL, "d_model": 64, "num_heads": 4},
        recipe=Recipe(steps=1000, learning_rate=1e-3, warm_up=50, num_samples=512),
        variants=(
            Variant("plain"),
            Variant("dropout 0.1", "a tenth of the activations", {"dropout": 0.1}),
            Variant("dropout 0.3", "three tenths of the activations", {"dropout": 0.3}),
            Variant("DropPath 0.2", "a fifth of the sublayers", {"drop_path": 0.2}),
            Variant("label smoothing 0.1", "hard targets", recipe={"label_smoothing": 0.1}),
            Variant("weight decay 1", "weights that nothing holds", recipe={"weight_decay": 1.0}),
            Variant("fresh data", "(512 samples, for as many as are drawn)", recipe={"num_samples": 0}),
        ),
        tasks=("noisy-precede",),
        fit="calibration",
        predictions=(
            Prediction("dropout 0.3", "helps", "Srivastava et al. 2014, figure 9: small data sets",
                       registered="2026-11-23"),
            Prediction("DropPath 0.2", "helps", "Huang et al. 2016", registered="2026-11-23"),
            Prediction("weight decay 1", "helps", "Krogh & Hertz 1991: it suppresses noise on the targets",
                       registered="2026-11-23"),
            Prediction("label smoothing 0.1", "helps", "Lukasik et al. 2020: it helps where labels are noisy",
                       registered="2026-11-23"),
            Prediction("fresh data", "helps", "no sample comes twice, so that none is learnt by heart",
                       registered="2026-11-23"),
        ),
        expectations=(
            Expectation("noisy-precede, dropout 0.3: calibration error, less the base's", *BETTER,
                        "Guo et al. 2017, section 3: overfitting is overconfidence", registered="2026-11-23"),
            Expectation("noisy-precede, label smoothing 0.1: calibration error, less the base's", *BETTER,
                        "Müller et al. 2019, section 3: it calibrates what is overconfident", registered="2026-11-23"),
        ),
    ),
    Study(
        name="objective",
        question="Is it better to learn from every next token, or from hidden ones on both sides?",
        source="Devlin et al. 2019; Radford et al. 2018; Clark et al. 2020",
        config={"num_layers": 2, "d_model": 32, "num_heads": 2, "positions": "learned", "reads": "both",
                "vocab_size": STATES + 1, "max_len": LENGTH},
        recipe=Recipe(steps=2000, learning_rate=3e-3, warm_up=100, schedule="cosine", objective="masked"),
        variants=(
            Variant("masked 15 %, both sides"),
            Variant("masked 40 %, both sides", "15 %, for 40 % hidden", recipe={"mask_share": 0.4}),
            Variant("next token, left side", "what stands behind", {"reads": "left"}, {"objective": "next"}),
        ),
        tasks=("continue", "infill"),
        predictions=(
            Prediction("next token, left side", "helps", "Clark et al. 2020, section 3.4: all tokens teach, not 15 %",
                       tasks=("continue",), registered="2026-11-23"),
            Prediction("next token, left side", "hurts", "what stands behind is not known: .417 is its bound, not .606",
                       tasks=("infill",), registered="2026-11-23"),
            Prediction("masked 40 %, both sides", "helps", "Wettig et al. 2023: 40 % beats 15 %",
                       registered="2026-11-23"),
        ),
    ),
    Study(
        name="entropy",
        question="Is attention spread early and sharp late, and through training, and which heads are dormant?",
        source="Clark et al. 2019, section 3; Michel et al. 2019; the textbook's early-high, late-low",
        config={"num_layers": 4, "d_model": 32, "num_heads": 4, "positions": "learned"},
        # 50 epochs over 1,024 samples
        recipe=Recipe(steps=1600, learning_rate=1e-3, warm_up=32, num_samples=1024),
        variants=(
            Variant("pre-LN"),
            Variant("post-LN", "the clean skip path", {"norm_placement": "post"}),
            Variant("no scale", "1 / sqrt(d_k)", {"attention_scale": 1.0}),
        ),
        tasks=("precede", "induction"),
        fit="entropy",
        heads=True,
        predictions=(
            Prediction("post-LN", "alike", "Xiong et al. 2020: with a warm-up as good", tasks=("precede",),
                       registered="2026-11-23"),
        ),
        expectations=(
            Expectation("precede, pre-LN: entropy, late less early layer", *BETTER, "textbooks: early high, late low",
                        registered="2026-11-23"),
            Expectation("induction, pre-LN: entropy, late less early layer", *BETTER, "textbooks: high, then low",
                        registered="2026-11-23"),
            Expectation("precede, pre-LN: entropy, late layer, end less start", *BETTER,
                        "Clark et al. 2019, section 3: heads come to attend to few tokens", registered="2026-11-23"),
            Expectation("precede, pre-LN: share of dormant heads", 0.5, 1.0,
                        "Michel et al. 2019, section 3: most heads can be missed", registered="2026-11-23"),
        ),
    ),
    Study(
        name="scaling-law",
        question="Does the loss above its floor fall as a power of size and of data?",
        source="Kaplan et al. 2020; Hoffmann et al. 2022",
        config={"num_layers": 2, "d_model": 32, "num_heads": 2, "positions": "rotary"},
        recipe=Recipe(steps=500, learning_rate=3e-3, warm_up=50, schedule="cosine", batch_size=16),
        variants=(
            Variant("d=32"),
            *(Variant(f"d={d}", f"(width {d})", {"d_model": d, "num_heads": 2}) for d in (4, 8, 12, 16, 24, 48)),
            # each sample is seen once, so data and steps go together
            *(Variant(f"samples={n}", f"(8000 samples, for {n})", recipe={"steps": n // 16, "warm_up": n // 160})
              for n in (160, 320, 640, 1600, 3200, 16000)),
        ),
        tasks=("source",),
        fit="scaling-law",
        predictions=(
            Prediction("d=4", "hurts", "four channels hold no table of sixteen tokens", registered="2026-11-21"),
            Prediction("samples=160", "hurts", "Kaplan et al. 2020: data bounds the loss", registered="2026-11-21"),
        ),
    ),
    Study(
        name="zipf-law",
        question="Where the law is known, is it found? Facts asked by Zipf's law make the error a power of the data.",
        source="Hutter 2021; Michaud et al. 2023",
        config={"num_layers": 1, "d_model": 64, "num_heads": 2, "positions": "learned"},
        recipe=Recipe(steps=20, learning_rate=3e-3, warm_up=2, batch_size=64),
        variants=(Variant("samples=1280"), *(_samples(1280 * 2**k) for k in range(1, 7))),
        tasks=("zipf-facts",),
        fit="scaling-law",
        predictions=(Prediction("samples=81920", "helps", "Hutter 2021: more facts are met", registered="2026-11-23"),),
        expectations=(
            Expectation("zipf-facts: exponent of samples", -(1 - 1 / ZIPF) - 0.1, -(1 - 1 / ZIPF) + 0.1,
                        "Hutter 2021: -(1 - 1/1.5) = -1/3 of a learner that keeps all it met",
                        registered="2026-11-23"),
        ),
    ),
    Study(
        name="views",
        question="Does attention over several views of an object beat averaging them?",
        source="Su et al. 2015 (multi-view CNN); Chen et al. 2021 (MVT)",
        config={"head": "transformer", "d_model": 32, "num_heads": 2, "num_layers": 2, "num_classes": 4},
        recipe=Recipe(steps=200, learning_rate=1e-3, warm_up=20),
        variants=(Variant("transformer head"), Variant("averaging", "attention of views", {"head": "average"})),
        tasks=("views",),
        # theorem: attention without positions is equivariant and the mean invariant, so neither head sees an order
        checks=("permutation",),
        predictions=(
            Prediction("averaging", "hurts", "Chen et al. 2021: attention over views beats pooling them",
                       registered="2026-11-23"),
        ),
    ),
)  # fmt: skip
