"""What each part of a Transformer buys, of the reference and of anybody's model: trials, studies, statistics.

    from veriformer.ablations import Study, Variant

    study = Study(name="gate", build=lambda gate=True, **sizes: GPT(gate=gate, **sizes), tasks="copy",
                  variants=[Variant("gate"), Variant("no gate", config={"gate": False})])

is run by `veriformer ablate path/study.py:study`. The public names are loaded when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from veriformer.ablations.studies.study import Prediction, Setting, Study, Variant
    from veriformer.ablations.tasks.task import Samples, Task
    from veriformer.ablations.trials.recipe import Recipe

__all__ = ["Prediction", "Recipe", "Samples", "Setting", "Study", "Task", "Variant"]

_HOMES = {
    "Prediction": "studies.study",
    "Recipe": "trials.recipe",
    "Samples": "tasks.task",
    "Setting": "studies.study",
    "Study": "studies.study",
    "Task": "tasks.task",
    "Variant": "studies.study",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"veriformer.ablations has no {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(f"veriformer.ablations.{_HOMES[name]}"), name)
