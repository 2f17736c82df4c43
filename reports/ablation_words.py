"""What a study was made of, in words: model, tasks, recipe, machine, commit and seeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Study = Mapping[str, Any]
_PLACES = {"pre": "before each sublayer", "post": "after each sublayer"}
_NORMS = {"layer": "LayerNorm", "rms": "RMSNorm"}


def made_by(record: Mapping[str, Any]) -> str:
    """Return the machine, the versions, the commit and the day."""
    versions, told, device = record["versions"], record.get("machine") or {}, record["device_name"]
    machine = f"{told['processor']}, {told['cores']} cores" if told else versions.get("machine", "a machine")
    where = machine if device == "cpu" else f"{device} ({machine})"
    commit = f"commit {record['commit']}" if record.get("commit") else f"code {record.get('code', 'unknown')[:12]}"
    return (
        f"Trained on {where}, with torch {versions['torch']} and Python {versions['python']}, from {commit}, "
        f"{record['date']}"
    )


def model(study: Study) -> str:
    """Return the base of a study.

    >>> model({"config": {"num_layers": 2, "d_model": 32, "num_heads": 2, "positions": "learned"}})
    'The base: 2 layers, d_model 32, 2 heads, d_ff 128, learned positions, LayerNorm before each sublayer.'
    """
    if "model" in study.get("own", ()):
        sizes = ", ".join(f"{name} {value}" for name, value in study.get("config", {}).items())
        return f"The base is a model of one's own{', built with ' + sizes if sizes else ''}."
    given = {"norm": "layer", "norm_placement": "pre", **study.get("config", {})}
    told = [
        f"{given[name]} {word}" if name != "d_model" else f"d_model {given[name]}"
        for name, word in (("num_layers", "layers"), ("d_model", ""), ("num_heads", "heads"))
        if name in given
    ]
    if "d_model" in given:
        told.append(f"d_ff {given.get('d_ff') or 4 * given['d_model']}")
    if "positions" in given:
        told.append("no positions" if given["positions"] == "none" else f"{given['positions']} positions")
    norm = given["norm"]
    place = _PLACES.get(given["norm_placement"], "")
    told.append("no normalization" if norm == "none" else f"{_NORMS.get(norm, norm)} {place}".strip())
    known = {"num_layers", "d_model", "num_heads", "d_ff", "positions", "norm", "norm_placement"}
    told += [f"{name} {value}" for name, value in given.items() if name not in known]
    return f"The base: {', '.join(told)}."


def recipe(study: Study) -> str:
    """Return how the base is trained.

    >>> recipe({"recipe": {"steps": 200, "batch_size": 32, "learning_rate": 0.003, "warm_up": 20}})
    'Trained by AdamW for 200 steps of 32 samples, learning rate 0.003 after 20 steps of warm-up.'
    """
    given = study.get("recipe") or {}
    if "steps" not in given:
        return ""
    own = study.get("own", ())
    if "step" in own:
        return f"Trained for {given['steps']} steps of one's own."
    by = "an optimizer of one's own" if "optimizer" in own else "AdamW"
    fresh = f" drawn from {given['num_samples']} in all" if given.get("num_samples") else ""
    of = "" if "data" in own else f" of {given['batch_size']} samples{fresh}"
    told = [f"Trained by {by} for {given['steps']} steps{of}"]
    if "optimizer" in own:
        return f"{told[0]}."
    after = f" after {given['warm_up']} steps of warm-up" if given.get("warm_up") else " without warm-up"
    schedule = f", then {given['schedule']}" if given.get("schedule", "constant") != "constant" else ""
    told.append(f"learning rate {given['learning_rate']:g}{after}{schedule}")
    if "weight_decay" in given:
        told.append(f"weight decay {given['weight_decay']:g}")
    for name, word in (("clip", "gradients clipped at"), ("label_smoothing", "label smoothing")):
        if given.get(name):
            told.append(f"{word} {given[name]:g}")
    if given.get("autocast"):
        told.append("bfloat16 autocast")
    return f"{', '.join(told)}."


def tasks(study: Study) -> list[str]:
    """Return each task with its length, vocabulary, chance and best."""
    told = []
    for task in study["tasks"]:
        sizes = [f"{task['length']} long"] if task.get("length") else []  # nobody knows it of a task of one's own
        if task.get("vocab_size"):
            sizes.append(f"vocabulary {task['vocab_size']}")
        known = [
            f"{word} {task[name]:.3g}"
            for word, name in (("chance", "chance"), ("at best", "best"))
            if task[name] is not None
        ]
        sizes += [", ".join(known)] if known else []
        needs = f"; needs {', '.join(task['needs'])}" if task.get("needs") else ""
        beside = f" ({', '.join(sizes)}{needs})" if sizes or needs else ""
        told.append(f"{task['name']}: {task['statement'] or task.get('metric', 'accuracy')}{beside}")
    return told
