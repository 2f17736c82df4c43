"""One model, one task, one seed; identified by a hash of everything that determines its outcome."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from veriformer.ablations.trials.own import Place
from veriformer.ablations.trials.recipe import Recipe

DETERMINING = ("reference", "ablations/tasks", "ablations/trials", "ablations/training")
"""Source whose change makes stored trials stale, relative to the package."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What is trained; plain data.

    Attributes:
        task: its name.
        config: keyword arguments of the model's configuration.
        recipe: how it is trained.
        edits: parts taken out that no field of the configuration removes.
        lengths: other lengths at which it is tried.
        checks: theorems that are verified on the trained model.
        heads: whether each attention head is taken out in turn after training, to see what it is worth.
        seed: of initial weights and data; paired across variants.
        device: "cpu" or "cuda".
        own: of a trial of somebody's own study: where its code is. The path is no part of the key, the code is.
        stacked: whether its seeds can be trained as one model.
    """

    task: str
    config: Mapping[str, Any] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=Recipe)
    edits: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    checks: tuple[str, ...] = ()
    heads: bool = False
    seed: int = 0
    device: str = "cpu"
    own: Place | None = None
    stacked: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        told = {**asdict(self), "config": dict(self.config), "recipe": asdict(self.recipe)}
        if self.own is not None:
            place = {name: told["own"][name] for name in ("study", "setting", "variant")}
            told["own"] = {**place, "code": self.own.source.digest}
        return told

    def key(self, group: tuple[int, ...], others: tuple[str, ...] = ()) -> str:
        """Return the hash of this trial when it is trained together with the seeds `group`.

        The group belongs to it: a stacked product may round differently from another stack's.

        Args:
            group: seeds of the stack.
            others: what else tells the stack's trials from one another, where it is not the seed alone.
        """
        told = {**self.to_json(), "group": group, "torch": torch.__version__, "code": code_digest()}
        if others:
            told["others"] = others
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:24]


@functools.cache
def code_digest() -> str:
    """Return a hash of the source that determines a trial's outcome."""
    root = Path(__file__).parent.parent.parent
    digest = hashlib.sha256()
    for place in DETERMINING:
        path = root / place
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
