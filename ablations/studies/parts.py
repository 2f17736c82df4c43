"""Parts of a layer and of a model: scale, feed-forward network, pooling, registers, positions of decoders."""

from __future__ import annotations

from veriformer.ablations.studies.core import SMALL
from veriformer.ablations.studies.study import Expectation, Prediction, Setting, Study, Variant, register
from veriformer.ablations.trials.recipe import Recipe

DECODER = Recipe(steps=400, learning_rate=3e-3, warm_up=40)

FEW = Recipe(steps=200, learning_rate=2e-3, warm_up=20)
FEW_SAMPLES = (
    Setting("64 samples", {}, {"num_samples": 64}),
    Setting("512 samples", {"positions": "rotary"}, {"num_samples": 512, "steps": 400}),
)
"""Samples enough for the best poolings and too few for the others: with fresh ones every pooling solves these tasks."""

register(
    Study(
        name="positions-causal",
        question="What do positions buy a causal model, whose mask shows it some order already?",
        source="Haviv et al. 2022; Kazemnejad et al. 2023",
        config={**SMALL, "positions": "rotary"},
        recipe=DECODER,
        variants=(
            Variant("rotary"),
            Variant("none", "positional encoding", {"positions": "none"}),
            Variant("sinusoidal", "rotations, for sines", {"positions": "sinusoidal"}),
            Variant("learned", "rotations, for trained positions", {"positions": "learned"}),
            Variant("alibi", "rotations, for a bias -m |t - s|", {"positions": "alibi"}),
            Variant("t5", "rotations, for a trained bias by distance", {"positions": "t5"}),
        ),
        tasks=("copy", "induction"),
        predictions=(
            Prediction("none", "hurts", "Haviv et al. 2022, table 1: behind; the mask tells some order",
                       registered="2026-11-23"),
            Prediction("learned", "alike", "Su et al. 2021, section 4: on par", registered="2026-11-23"),
        ),
        lengths=(8, 24),
        fit="lengths",
        expectations=(
            Expectation("copy, learned: accuracy at T = 8", 0.0, 0.9, "Kazemnejad et al. 2023: it does not carry over",
                        registered="2026-11-23"),
            Expectation("copy, rotary: accuracy at T = 8", 0.0, 0.9, "Kazemnejad et al. 2023: it does not carry over",
                        registered="2026-11-23"),
            Expectation("induction, t5: accuracy at T = 24", 0.9, 1.0, "Press et al. 2022: a bias by distance holds",
                        registered="2026-11-23"),
        ),
    ),
    Study(
        name="scaling",
        question="What does dividing the scores by sqrt(d_k) buy?",
        source="Vaswani et al. 2017, section 3.2.1 and footnote 4; Yang et al. 2022 (muP, 1 / d_k)",
        config={"num_layers": 2, "d_model": 64, "num_heads": 1, "positions": "learned"},
        recipe=Recipe(steps=300, warm_up=30),
        variants=(
            Variant("1 / sqrt(d_k)"),
            Variant("none", "the scale", {"attention_scale": 1.0}),
            Variant("1 / d_k", "the square root", {"attention_scale": 1 / 64}),
        ),
        tasks=("precede", "induction"),
        settings=tuple(Setting(f"lr={rate:g}", {}, {"learning_rate": rate}) for rate in (1e-3, 3e-3)),
        predictions=(
            Prediction("none", "hurts", "Vaswani et al. 2017, footnote 4", tasks=("induction",),
                       registered="2026-11-21"),
            Prediction("none", "slower", "Vaswani et al. 2017, footnote 4: small gradients", tasks=("precede",),
                       registered="2026-11-23"),
            Prediction("1 / d_k", "slower", "nearly even attention at the start: Yang et al. 2022 change the rates too",
                       tasks=("precede",), settings=("lr=0.001",), registered="2026-11-23"),
        ),
    ),
    Study(
        name="feed-forward",
        question="What do the feed-forward network, its width and its activation buy?",
        source="Vaswani et al. 2017, section 3.3; Shazeer 2020; Geva et al. 2021",
        config={**SMALL, "num_layers": 1},
        recipe=Recipe(steps=800, batch_size=256, learning_rate=3e-3, warm_up=50, schedule="cosine"),
        variants=(
            Variant("4d ReLU"),
            Variant("no feed-forward", "the whole network", edits=("no feed-forward",)),
            Variant("1d", "three quarters of the width", {"d_ff": 32}),
            Variant("2d", "half of the width", {"d_ff": 64}),
            Variant("8d", "(twice the width)", {"d_ff": 256}),
            Variant("GELU", "ReLU", {"activation": "gelu"}),
            Variant("SwiGLU", "ReLU and two matrices, for three", {"activation": "swiglu", "d_ff": 85}),
        ),
        # too many facts for any of these: none is at the ceiling
        tasks=("facts",),
        predictions=(
            Prediction("no feed-forward", "hurts", "Geva et al. 2021: facts are stored there", registered="2026-11-23"),
            Prediction("1d", "hurts", "Allen-Zhu & Li 2024: facts take bits, and bits parameters",
                       registered="2026-11-23"),
            Prediction("2d", "hurts", "Allen-Zhu & Li 2024", registered="2026-11-23"),
            Prediction("8d", "helps", "Allen-Zhu & Li 2024", registered="2026-11-23"),
            Prediction("GELU", "helps", "Shazeer 2020, table 1: lower perplexity than ReLU", registered="2026-11-23"),
            Prediction("SwiGLU", "helps", "Shazeer 2020, table 1: lower perplexity at equal parameters",
                       registered="2026-11-23"),
        ),
    ),
    Study(
        name="pooling",
        question="Which pooling fits which task?",
        source="Devlin et al. 2019 (class token); Reimers & Gurevych 2019, table 6",
        config=SMALL,
        recipe=FEW,
        variants=(
            Variant("mean"),
            Variant("cls", "the mean, for a class token", {"pooling": "cls"}),
            Variant("max", "the mean, for the maximum", {"pooling": "max"}),
            Variant("weighted", "the mean, for a weighted one", {"pooling": "weighted"}),
        ),
        # to count to seven among 25, and to find one token by its neighbour
        tasks=("mode", "after"),
        settings=FEW_SAMPLES,
        skip=lambda task, setting, variant: (task == "mode") != (setting == "64 samples"),
        predictions=(
            Prediction("max", "hurts", "Xu et al. 2019, section 5.3: a maximum counts nothing", tasks=("mode",),
                       registered="2026-11-23"),
            Prediction("cls", "hurts", "Reimers & Gurevych 2019, table 6: the mean is the better",
                       registered="2026-11-23"),
            Prediction("max", "faster", "Collobert et al. 2011, section 3.2: the place that matters stands out",
                       tasks=("after",), registered="2026-11-23"),
        ),
    ),
    Study(
        name="registers",
        question="Do register tokens, which are never read, buy anything?",
        source="Darcet et al. 2024",
        config=SMALL,
        recipe=FEW,
        variants=(
            Variant("no register"),
            Variant("1 register", "(a register)", {"num_registers": 1}),
            Variant("4 registers", "(four registers)", {"num_registers": 4}),
        ),
        tasks=("mode", "after"),
        settings=FEW_SAMPLES,
        skip=lambda task, setting, variant: (task == "mode") != (setting == "64 samples"),
        predictions=(
            Prediction("4 registers", "alike", "Darcet et al. 2024, table 2: classification within half a point",
                       registered="2026-11-23"),
        ),
    ),
    Study(
        name="addition",
        question="What does it take to add two numbers?",
        source="Nogueira et al. 2021; Lee et al. 2024 (digits reversed); Quirke & Barez 2024",
        config={**SMALL, "d_model": 64, "num_heads": 4},
        recipe=Recipe(steps=1500, learning_rate=1e-3, warm_up=75, schedule="cosine"),
        variants=(
            Variant("learned, N=2"),
            Variant("no positions", "positional encoding", {"positions": "none"}),
            Variant("rotary", "trained positions, for rotations", {"positions": "rotary"}),
            Variant("N=1", "the second layer", {"num_layers": 1}),
            Variant("no feed-forward", "the whole network", edits=("no feed-forward",)),
            Variant("no residual", "x + f(x)", {"residual": False}),
            Variant("d=32", "half of the width", {"d_model": 32}),
        ),
        tasks=("addition",),
        predictions=(
            Prediction("no positions", "hurts", "Nogueira et al. 2021: a digit counts by its place",
                       registered="2026-11-23"),
            Prediction("no feed-forward", "hurts", "Quirke & Barez 2024: sums of digits are looked up there",
                       registered="2026-11-23"),
            Prediction("N=1", "hurts", "Quirke & Barez 2024: one layer does not carry through",
                       registered="2026-11-23"),
            Prediction("no residual", "hurts", "He et al. 2016", registered="2026-11-23"),
        ),
    ),
    Study(
        name="decoder",
        question="Which of a decoder's tasks need positions, and which a second layer?",
        source="Olsson et al. 2022 (induction heads); Gu & Dao 2023 (selective copy)",
        config={**SMALL, "positions": "rotary"},
        recipe=DECODER,
        variants=(
            Variant("rotary, N=2"),
            Variant("no positions", "positional encoding", {"positions": "none"}),
            Variant("N=1", "the second layer", {"num_layers": 1}),
            Variant("no residual", "x + f(x)", {"residual": False}),
        ),
        tasks=("copy", "reverse", "sort", "induction", "selective-copy"),
        predictions=(
            Prediction("no positions", "hurts", "order is what is asked", tasks=("copy", "reverse", "induction"),
                       registered="2026-11-21"),
            Prediction("N=1", "hurts", "Olsson et al. 2022: induction takes two layers", tasks=("induction",),
                       registered="2026-11-21"),
        ),
    ),
    Study(
        name="seq2seq",
        question="What does the attention to the source buy an encoder-decoder?",
        source="Bahdanau et al. 2015; Vaswani et al. 2017, section 3.2.3",
        config={**SMALL, "positions": "rotary"},
        recipe=Recipe(steps=300, learning_rate=3e-3, warm_up=40),
        variants=(
            Variant("cross-attention"),
            Variant("no cross-attention", "the attention to the source", edits=("no cross-attention",)),
        ),
        tasks=("translate-reverse", "translate-sort"),
        predictions=(
            Prediction("no cross-attention", "chance", "nothing of the source is known", tasks=("translate-reverse",),
                       registered="2026-11-21"),
            Prediction("no cross-attention", "hurts", "only the target's own tokens help", tasks=("translate-sort",),
                       registered="2026-11-21"),
        ),
    ),
)  # fmt: skip
