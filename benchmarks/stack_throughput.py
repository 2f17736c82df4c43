"""Trials a second of 1, 8, 64 and 256 seeds trained together against one by one, and how busy the GPU is.

python benchmarks/stack_throughput.py [--device cuda] [--steps 60] [--widths 1 8 64 256] > table.md
"""

from __future__ import annotations

import argparse
import time

import pandas as pd
import torch
from torch.profiler import ProfilerActivity, profile

from veriformer.ablations.training.loop import train
from veriformer.ablations.trials.recipe import Recipe
from veriformer.ablations.trials.trial import Trial

CONFIG = {
    "architecture": "classifier", "vocab_size": 8, "num_classes": 2, "max_len": 8, "positions": "learned",
    "num_layers": 2, "d_model": 64, "num_heads": 4,
}  # fmt: skip


def group(width: int, steps: int, device: str) -> list[Trial]:
    """Return the trials of a stack."""
    return [
        Trial(task="precede", config=CONFIG, recipe=Recipe(steps=steps), seed=seed, device=device)
        for seed in range(width)
    ]


def seconds(trials: list[Trial]) -> float:
    """Return how long a stack trains."""
    started = time.perf_counter()
    train(trials)
    return time.perf_counter() - started


def busy(trials: list[Trial]) -> str:
    """Return the share of the time in which the GPU runs a kernel."""
    if trials[0].device != "cuda":
        return "not measured"
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        wall = seconds(trials)
    kernels = sum(event.self_device_time_total for event in seen.key_averages()) / 1e6
    return f"{kernels / wall:.0%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Trials a second by the number of seeds trained together.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 8, 64, 256])
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    seconds(group(1, 3, arguments.device))
    alone = min(seconds(group(1, arguments.steps, arguments.device)) for _ in range(2))
    rows = []
    for width in arguments.widths:
        trials = group(width, arguments.steps, arguments.device)
        each = seconds(trials) / width
        rows.append({"seeds together": width, "trials/s": round(1 / each, 2), "against one": round(alone / each, 2),
                     "GPU busy": busy(trials)})  # fmt: skip
    print(pd.DataFrame(rows).to_markdown(index=False))
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu, one thread"
    print(f"\nN=2, d=64, T=8, B=32, {arguments.steps} steps; {name}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
