"""How a model is trained and what becomes of it: recipe, entropy through training, scaling laws, several views."""

from __future__ import annotations

from veriformer.ablations.studies.core import SMALL
from veriformer.ablations.studies.study import Prediction, Study, Variant, register
from veriformer.ablations.trials.recipe import Recipe

register(
    Study(
        name="recipe",
        question="What do the parts of the training recipe buy?",
        source="Szegedy et al. 2016; Müller et al. 2019; Srivastava et al. 2014; Huang et al. 2016",
        config={**SMALL, "positions": "learned"},
        recipe=Recipe(steps=250, learning_rate=2e-3, warm_up=25),
        variants=(
            Variant("plain"),
            Variant("label smoothing 0.1", "hard targets", recipe={"label_smoothing": 0.1}),
            Variant("clipping 1", "gradients longer than 1", recipe={"clip": 1.0}),
            Variant("dropout 0.1", "a tenth of the activations", {"dropout": 0.1}),
            Variant("dropout 0.3", "three tenths of the activations", {"dropout": 0.3}),
            Variant("DropPath 0.1", "a tenth of the sublayers", {"drop_path": 0.1}),
            Variant("init GPT-2", "Xavier, for N(0, 0.02^2)", {"init": "gpt2"}),
            Variant("init torch", "Xavier, for torch's default", {"init": "default"}),
            Variant("beta2 0.95", "0.999", recipe={"beta2": 0.95}),
            Variant("bfloat16 autocast", "float32 products", recipe={"autocast": True}),
        ),
        tasks=("precede", "count"),
        predictions=(
            Prediction("dropout 0.3", "slower", "a small model on endless data has nothing to overfit"),
            Prediction("clipping 1", "equivalent", "seen at this size"),
            Prediction("bfloat16 autocast", "equivalent", "Micikevicius et al. 2018"),
            Prediction("label smoothing 0.1", "equivalent", "calibration is what moves (Müller et al. 2019)"),
        ),
    ),
    Study(
        name="entropy",
        question="Is attention spread early and sharp late, by layer and through training?",
        source="Clark et al. 2019, section 3; the textbook's early-high, late-low",
        config={"num_layers": 4, "d_model": 32, "num_heads": 4, "positions": "learned"},
        # 50 epochs over 1,024 samples
        recipe=Recipe(steps=1600, learning_rate=1e-3, warm_up=32, num_samples=1024),
        variants=(
            Variant("pre-LN"),
            Variant("post-LN", "the clean skip path", {"norm_placement": "post"}),
            Variant("no scale", "1 / sqrt(d_k)", {"attention_scale": 1.0}),
        ),
        tasks=("precede",),
        predictions=(Prediction("post-LN", "depends", "placement moves where attention sharpens"),),
    ),
    Study(
        name="scaling-law",
        question="Does the loss above the source's entropy fall as a power of size and of data?",
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
            Prediction("d=4", "hurts", "four channels hold no table of sixteen tokens"),
            Prediction("samples=160", "hurts", "Kaplan et al. 2020: data bounds the loss"),
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
        predictions=(
            Prediction(
                "averaging", "depends", "theorem: either head ignores the order of the views; accuracy is measured"
            ),
        ),
    ),
)  # fmt: skip
