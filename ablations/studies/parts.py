"""Parts of a layer and of a model: scale, feed-forward network, pooling, depth and width, positions of decoders."""

from __future__ import annotations

from veriformer.ablations.studies.core import DEEP, SMALL, WARM_UP
from veriformer.ablations.studies.study import Prediction, Setting, Study, Variant, register
from veriformer.ablations.trials.recipe import Recipe

DECODER = Recipe(steps=400, learning_rate=3e-3, warm_up=40)

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
            Prediction("none", "hurts", "seen at this size; not at chance, for the mask alone tells some order"),
            Prediction("learned", "equivalent", "seen at this size"),
        ),
    ),
    Study(
        name="residual-map",
        question="At which depths and learning rates does a model live without residual connections?",
        source="Dong et al. 2021; He et al. 2016",
        config=DEEP,
        recipe=Recipe(steps=300, warm_up=WARM_UP),
        variants=(Variant("residual"), Variant("no residual", "x + f(x), leaving f(x)", {"residual": False})),
        tasks=("precede",),
        settings=tuple(
            Setting(f"N={depth} lr={rate:g}", {"num_layers": depth}, {"learning_rate": rate})
            for depth in (1, 3, 6, 12)
            for rate in (5e-4, 1e-3, 2e-3, 4e-3)
        ),
        predictions=(
            Prediction("no residual", "hurts", "Dong et al. 2021", settings=("N=12 lr=0.002", "N=12 lr=0.004")),
            Prediction("no residual", "depends", "slow, not impossible", settings=("N=6 lr=0.0005",)),
        ),
    ),
    Study(
        name="residual-norm",
        question="Do residual connections and normalization depend on each other?",
        source="Xiong et al. 2020; Zhang et al. 2019 (Fixup)",
        config=DEEP,
        recipe=Recipe(steps=300, warm_up=WARM_UP),
        variants=(Variant("residual"), Variant("no residual", "x + f(x), leaving f(x)", {"residual": False})),
        tasks=("precede",),
        settings=tuple(
            Setting(f"norm={name} lr={rate:g}", change, {"learning_rate": rate})
            for name, change in (("pre", {}), ("post", {"norm_placement": "post"}), ("none", {"norm": "none"}))
            for rate in (5e-4, 2e-3)
        ),
        predictions=(
            Prediction("no residual", "hurts", "seen: .56 against 1.00", settings=("norm=pre lr=0.002",)),
            Prediction("no residual", "depends", "without both it trains again", settings=("norm=none lr=0.002",)),
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
            Prediction("none", "hurts", "Vaswani et al. 2017, footnote 4; seen with three seeds", tasks=("induction",)),
            Prediction("none", "depends", "entropy collapses at the start; training may mend it", tasks=("precede",)),
            Prediction("1 / d_k", "depends", "seen: the sign flips with the rate"),
        ),
    ),
    Study(
        name="feed-forward",
        question="What do the feed-forward network, its width and its activation buy?",
        source="Vaswani et al. 2017, section 3.3; Shazeer 2020",
        config={**SMALL, "positions": "learned"},
        recipe=DECODER,
        variants=(
            Variant("4d ReLU"),
            Variant("no feed-forward", "the whole network", edits=("no feed-forward",)),
            Variant("2d", "half of the width", {"d_ff": 64}),
            Variant("8d", "(twice the width)", {"d_ff": 256}),
            Variant("GELU", "ReLU", {"activation": "gelu"}),
            Variant("SwiGLU", "ReLU and two matrices, for three", {"activation": "swiglu", "d_ff": 85}),
        ),
        tasks=("precede", "induction", "memorise"),
        predictions=(
            Prediction("no feed-forward", "hurts", "facts are stored there (Geva et al. 2021)", tasks=("memorise",)),
            Prediction("GELU", "equivalent", "small effects, seen at this size"),
            Prediction("SwiGLU", "equivalent", "small effects, seen at this size"),
        ),
    ),
    Study(
        name="pooling",
        question="Which pooling fits which task?",
        source="Devlin et al. 2019 (class token); Reimers & Gurevych 2019, table 6",
        config={**SMALL, "positions": "learned"},
        recipe=Recipe(steps=200, learning_rate=2e-3, warm_up=20),
        variants=(
            Variant("mean"),
            Variant("cls", "the mean, for a class token", {"pooling": "cls"}),
            Variant("max", "the mean, for the maximum", {"pooling": "max"}),
            Variant("weighted", "the mean, for a weighted one", {"pooling": "weighted"}),
        ),
        tasks=("precede", "majority", "needle"),
        predictions=(
            Prediction("max", "faster", "one token in 32 stands out in a maximum", tasks=("needle",)),
            Prediction("cls", "equivalent", "seen at this size", tasks=("majority",)),
        ),
    ),
    Study(
        name="depth-width",
        question="Is depth or width the better use of parameters?",
        source="Tay et al. 2022; Levine et al. 2020; the textbook rule is tested, not assumed",
        config={"num_layers": 2, "d_model": 64, "num_heads": 4, "positions": "learned"},
        recipe=Recipe(steps=500, learning_rate=1e-3, warm_up=50),
        variants=(
            Variant("N=2 d=64"),
            Variant("N=6 d=64", "(three times the depth)", {"num_layers": 6}),
            Variant("N=12 d=64", "(six times the depth)", {"num_layers": 12}),
            Variant("N=2 d=128", "(twice the width)", {"d_model": 128}),
            Variant("N=6 d=128", "(three times the depth, twice the width)", {"num_layers": 6, "d_model": 128}),
            Variant("N=8 d=32", "width, for depth, at equal parameters", {"num_layers": 8, "d_model": 32}),
        ),
        tasks=("hops", "memorise"),
        predictions=(
            Prediction("N=6 d=64", "helps", "composition wants depth (textbook); seen with two seeds", tasks=("hops",)),
            Prediction("N=2 d=128", "faster", "memory wants parameters", tasks=("memorise",)),
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
        tasks=("copy", "reverse", "sort", "addition", "induction", "selective-copy"),
        predictions=(
            Prediction("no positions", "hurts", "order is what is asked", tasks=("copy", "reverse", "induction")),
            Prediction("N=1", "hurts", "Olsson et al. 2022: induction takes two layers", tasks=("induction",)),
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
            Prediction("no cross-attention", "chance", "nothing of the source is known", tasks=("translate-reverse",)),
            Prediction("no cross-attention", "hurts", "only the target's own tokens help", tasks=("translate-sort",)),
        ),
    ),
)  # fmt: skip
