"""The learning rate of MAE: linear warm-up, then half a cosine down to a floor."""
import math
from types import SimpleNamespace

from veriformer.properties import Subject

ARGS = SimpleNamespace(lr=1.5e-3, min_lr=1e-4, warmup_steps=20, steps=200)


def adjust_learning_rate(args, step):
    """Decay the learning rate with half-cycle cosine after warmup."""
    if step < args.warmup_steps:
        return args.lr * step / args.warmup_steps
    if step >= args.steps:
        return args.min_lr
    progress = (step - args.warmup_steps) / (args.steps - args.warmup_steps)
    return args.min_lr + (args.lr - args.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


subject = Subject(
    kind="schedule",
    name="half cosine",
    build=lambda c: ARGS,
    forward=lambda args, step: adjust_learning_rate(args, step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 1.5e-3, "floor": 1e-4},
)
