"""Trials a second of the harness against a plain one-model training loop with torch's defaults; and its overhead.

    python benchmarks/ablation_speed.py [--seeds 12] [--device cpu] > table.md

Both do the same work in the same run: same models, tasks, recipes and seeds. The plain loop is what a person writes:
one model after the other in one process, torch's default threads, fresh batches drawn every step, tested at the end.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace

import pandas as pd
import torch
from torch.nn import functional

from veriformer.ablations.execution.executors import local, run_jobs
from veriformer.ablations.execution.plan import Job
from veriformer.ablations.tasks import TASKS
from veriformer.ablations.training.loop import train
from veriformer.ablations.training.samples import HELD_OUT, HELD_OUT_SEED
from veriformer.ablations.training.stacking import Stack, build_one
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

SIZES = {
    "small: N=2, d=32, 150 steps": ({"num_layers": 2, "d_model": 32, "num_heads": 2}, 150),
    "standard: N=2, d=64, 250 steps": ({"num_layers": 2, "d_model": 64, "num_heads": 4}, 250),
    "deep: N=6, d=64, 300 steps": ({"num_layers": 6, "d_model": 64, "num_heads": 4}, 300),
}


def trial_of(name: str, seed: int, device: str) -> Trial:
    """Return one trial of a size."""
    size, steps = SIZES[name]
    config = {
        "architecture": "classifier", "vocab_size": 8, "num_classes": 2, "max_len": 8, "positions": "learned", **size,
    }  # fmt: skip
    return Trial(task="precede", config=config, recipe=Recipe(steps=steps, warm_up=20), seed=seed, device=device)


def plain(trial: Trial) -> float:
    """Train one model as a person would; return its accuracy."""
    model, recipe, task = build_one(trial).to(trial.device), trial.recipe, TASKS[trial.task]
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    for step in range(recipe.steps):
        batch = task.draw(trial.seed * recipe.steps + step, recipe.batch_size)
        loss = functional.cross_entropy(model(batch.inputs[0].to(trial.device)), batch.labels.to(trial.device))
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        test = task.draw(HELD_OUT_SEED, HELD_OUT)
        guess = model(test.inputs[0].to(trial.device)).argmax(dim=-1).cpu()
    return float((guess == test.labels).float().mean())


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def harness(trials: list[Trial], processes: int) -> float:
    """Return how long the harness takes for the trials, once its processes are there."""
    groups = [Job(tuple(trials[i::processes])) for i in range(processes)]
    warm = [Job((replace(t, recipe=Recipe(steps=2)),)) for t in trials[:processes]]
    with local(processes) as executor:
        for _ in run_jobs(executor, warm, ahead=processes):
            pass
        return seconds(lambda: list(run_jobs(executor, groups, ahead=processes)))


def bare_step(trials: list[Trial], steps: int = 60) -> float:
    """Return the time of forward, backward and update of a stack, nothing else, per step."""
    stack, task = Stack(trials), TASKS[trials[0].task]
    optimizer = torch.optim.AdamW(stack.parameters.values(), fused=True)
    batches = [task.draw(t.seed, 32) for t in trials]
    tokens = torch.stack([b.inputs[0] for b in batches]).to(trials[0].device)
    labels = torch.stack([b.labels for b in batches]).to(trials[0].device)

    def run() -> None:
        for _ in range(steps):
            loss = functional.cross_entropy(stack(tokens).flatten(0, 1), labels.flatten(), reduction="sum") / 32
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    run()
    return seconds(run) / steps


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    processes = os.cpu_count() or 1 if arguments.device == "cpu" else 1
    threads = torch.get_num_threads()
    rows = []
    for name in SIZES:
        trials = [trial_of(name, seed, arguments.device) for seed in range(arguments.seeds)]
        few = trials[: max(2, arguments.seeds // 6)]
        plain(replace(trials[0], recipe=Recipe(steps=5)))
        alone = seconds(lambda few=few: [plain(t) for t in few]) / len(few)
        together = harness(trials, processes) / len(trials)
        torch.set_num_threads(1)
        bare = bare_step(trials[:12])
        whole = seconds(lambda trials=trials: train(trials[:12])) / trials[0].recipe.steps
        torch.set_num_threads(threads)
        rows.append(
            {
                "model": name,
                "plain loop, trials/s": round(1 / alone, 3),
                "harness, trials/s": round(1 / together, 3),
                "ratio": round(alone / together, 2),
                "overhead over the bare step": f"{whole / bare - 1:.0%}",
            }
        )
    print(pd.DataFrame(rows).to_markdown(index=False))
    print(
        f"\n{arguments.seeds} seeds; plain: one process, {threads} threads; harness: {processes} processes of "
        f"one thread, seeds in stacks; {arguments.device}, torch {torch.__version__}"
    )


if __name__ == "__main__":
    main()
