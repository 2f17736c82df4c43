"""Tied or untied output embedding on the shipped tasks; the model lives in a file beside this one."""
from s01_nets import Tagger
from veriformer.ablations import Recipe, Study, Variant

study = Study(
    name="tying",
    question="Does sharing the token table with the output projection matter for a tiny tagger?",
    build=Tagger,
    tasks=["copy", "sort"],
    recipe=Recipe(steps=50, learning_rate=3e-3, warm_up=5),
    variants=[
        Variant("tied"),
        Variant("untied", "two tables instead of one", {"tie": False}),
        Variant("fixed sines", "positions are a buffer", {"positions": "sin"}),
    ],
)
