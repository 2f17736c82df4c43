"""Learning rate: linear warm-up, then half a cosine down to a floor, then the floor."""

import math
from dataclasses import dataclass

from veriformer.properties import Subject


@dataclass
class TrainConfig:
    learning_rate: float = 6e-4
    min_lr: float = 6e-5
    warmup_iters: int = 20
    lr_decay_iters: int = 200


def get_lr(it, cfg):
    # 1) linear warmup
    if it < cfg.warmup_iters:
        return cfg.learning_rate * it / cfg.warmup_iters
    # 2) behind the decay: the floor
    if it > cfg.lr_decay_iters:
        return cfg.min_lr
    # 3) in between, a cosine
    decay_ratio = (it - cfg.warmup_iters) / (cfg.lr_decay_iters - cfg.warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return cfg.min_lr + coeff * (cfg.learning_rate - cfg.min_lr)


subject = Subject(
    kind="schedule",
    name="cosine with warm-up",
    build=lambda c: TrainConfig(),
    forward=lambda cfg, step: get_lr(step, cfg),
    declares={
        "schedule": "cosine",
        "warmup_steps": 20,
        "total_steps": 200,
        "peak": 6e-4,
        "floor": 6e-5,
        "first_step": 0,
    },
)
