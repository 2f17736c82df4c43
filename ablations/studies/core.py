"""The default studies: accuracy when positions, residual connections, LayerNorm or warm-up are removed."""

from __future__ import annotations

from veriformer.ablations.studies.study import Expectation, Prediction, Setting, Study, Variant, register
from veriformer.ablations.trials.recipe import Recipe

SMALL = {"num_layers": 2, "d_model": 32, "num_heads": 2, "positions": "learned"}
DEEP = {"num_layers": 6, "d_model": 32, "num_heads": 2, "positions": "learned"}

ORDER, CONTROLS = ("precede", "first", "bigram"), ("count", "majority")
WARM_UP = 125
RATES = {f"lr={rate:g}": {"learning_rate": rate} for rate in (1e-3, 2e-3, 3e-3)}

register(
    Study(
        name="positions",
        question="What do positional encodings buy, and what do they cost where order does not matter?",
        source="Vaswani et al. 2017, section 3.5; Lee et al. 2019, section 3",
        config=SMALL,
        recipe=Recipe(steps=200, learning_rate=3e-3, warm_up=20),
        variants=(
            Variant("learned"),
            Variant("none", "positional encoding", {"positions": "none"}),
            Variant("sinusoidal", "trained positions, for sines", {"positions": "sinusoidal"}),
            Variant("rotary", "trained positions, for rotations of queries and keys", {"positions": "rotary"}),
            Variant("alibi", "trained positions, for a symmetric bias -m |t - s|", {"positions": "alibi"}),
            Variant("t5", "trained positions, for a trained bias by distance", {"positions": "t5"}),
        ),
        tasks=(*ORDER, *CONTROLS),
        predictions=(
            Prediction(
                "none", "chance", "theorem: attention without positions is permutation-equivariant (Lee et al. 2019)",
                tasks=ORDER, theorem="permutation", registered="2026-11-21",
            ),
            Prediction(
                "none", "alike", "Zaheer et al. 2017, theorem 2: a sum over tokens holds all of a multiset",
                tasks=CONTROLS, registered="2026-11-23",
            ),
            Prediction(
                "alibi", "chance", "theorem: |t - s| and a mean cannot tell a sequence from its reverse",
                tasks=("precede", "bigram"), theorem="reversal", registered="2026-11-21",
            ),
            Prediction(
                "sinusoidal", "alike", "Vaswani et al. 2017, table 3 row E: nearly identical", tasks=ORDER,
                registered="2026-11-21",
            ),
            Prediction(
                "rotary", "faster", "Su et al. 2021, section 4.2: the loss falls faster", tasks=("precede", "bigram"),
                registered="2026-11-23",
            ),
        ),
        lengths=(16, 32),
        fit="lengths",
        expectations=(
            Expectation("precede, learned: accuracy at T = 32", 0.0, 0.9, "Press et al. 2022: rows never trained",
                        registered="2026-11-23"),
            Expectation("precede, rotary: accuracy at T = 32", 0.0, 0.95, "Press et al. 2022, figure 1: rotary falls",
                        registered="2026-11-23"),
            Expectation("bigram, t5: accuracy at T = 32", 0.9, 1.0, "Press et al. 2022: a bias by distance holds",
                        registered="2026-11-23"),
        ),
    ),
    Study(
        name="residual",
        question="What do residual connections buy, by depth and learning rate?",
        source="He et al. 2016; Dong et al. 2021 (rank collapse)",
        config=DEEP,
        recipe=Recipe(steps=300, warm_up=WARM_UP),
        variants=(Variant("residual"), Variant("no residual", "x + f(x), leaving f(x)", {"residual": False})),
        tasks=("precede", "count"),
        settings=tuple(
            Setting(f"N={depth} lr={rate:g}", {"num_layers": depth}, {"learning_rate": rate})
            for depth in (1, 6)
            for rate in (1e-3, 2e-3, 3e-3)
        ),
        # the control at one point only
        skip=lambda task, setting, variant: task == "count" and setting != "N=1 lr=0.002",
        predictions=(
            Prediction(
                "no residual", "hurts", "Dong et al. 2021: rank collapses with depth", tasks=("precede",),
                settings=("N=6 lr=0.002", "N=6 lr=0.003"), registered="2026-11-21",
            ),
            Prediction(
                "no residual", "alike", "He et al. 2016, section 4.1: a net that is not deep does as well without",
                tasks=("precede",), settings=("N=1 lr=0.002",), registered="2026-11-23",
            ),
        ),
    ),
    Study(
        name="norm",
        question="What does normalization buy, and where does it belong?",
        source="Ba et al. 2016; Xiong et al. 2020; Zhang & Sennrich 2019",
        config=DEEP,
        recipe=Recipe(steps=300),
        variants=(
            Variant("pre-LN"),
            Variant("post-LN", "the clean skip path: norm(x + f(x))", {"norm_placement": "post"}),
            Variant("RMSNorm", "the mean's removal and the bias", {"norm": "rms"}),
            Variant("no norm", "LayerNorm", {"norm": "none"}),
        ),
        tasks=("precede", "count"),
        settings=(
            *(Setting(name, {}, RATES[name]) for name in ("lr=0.001", "lr=0.003")),
            Setting("N=2 lr=0.003", {"num_layers": 2}, RATES["lr=0.003"]),
        ),
        # the control at a depth of its own, which is the cheaper
        skip=lambda task, setting, variant: (task == "count") != (setting == "N=2 lr=0.003"),
        predictions=(
            Prediction(
                "no norm", "hurts", "Bjorck et al. 2018, section 3: without normalization large steps diverge",
                settings=("lr=0.003",), registered="2026-11-23",
            ),
            Prediction(
                "post-LN", "hurts", "Xiong et al. 2020: needs warm-up, and here is none", tasks=("precede",),
                settings=("lr=0.003",), registered="2026-11-21",
            ),
            Prediction(
                "RMSNorm", "alike", "Zhang & Sennrich 2019: comparable", tasks=("precede",),
                registered="2026-11-21",
            ),
        ),
    ),
    Study(
        name="warm-up",
        question="Which placement of the norm needs a warm-up of the learning rate?",
        source="Xiong et al. 2020, sections 3 and 4",
        config=DEEP,
        recipe=Recipe(steps=300, warm_up=WARM_UP),
        variants=(Variant("warm-up"), Variant("no warm-up", "the first 125 small steps", {}, {"warm_up": 0})),
        tasks=("precede",),
        settings=tuple(
            Setting(f"{place}-LN {name}", {"norm_placement": place}, change)
            for place in ("pre", "post")
            for name, change in RATES.items()
        ),
        predictions=(
            Prediction(
                "no warm-up", "hurts", "Xiong et al. 2020, figure 2", settings=("post-LN lr=0.003",),
                registered="2026-11-21",
            ),
            Prediction("no warm-up", "alike", "Xiong et al. 2020, section 4: pre-LN needs none",
                       settings=tuple(f"pre-LN {name}" for name in RATES), registered="2026-11-21"),
        ),
    ),
)  # fmt: skip
