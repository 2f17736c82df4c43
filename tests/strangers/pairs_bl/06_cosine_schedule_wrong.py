WHAT = "The lambda's floor is the absolute learning rate, where LambdaLR multiplies by the base rate: the schedule ends at peak * floor (3.6e-8) instead of floor (line 22)."
"""Linear warm-up, then a cosine down to a floor, as a LambdaLR: the lambda is a factor on the optimizer's rate."""

import math
from dataclasses import dataclass

import torch
from torch.optim.lr_scheduler import LambdaLR

from veriformer.properties import Subject


@dataclass
class TrainConfig:
    lr: float = 6e-4
    min_lr: float = 6e-5
    warmup: int = 20
    max_steps: int = 200


def cosine_with_floor(cfg):
    min_ratio = cfg.min_lr

    def factor(step):
        if step < cfg.warmup:
            return step / cfg.warmup
        done = min(1.0, (step - cfg.warmup) / (cfg.max_steps - cfg.warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * done))
        return min_ratio + (1.0 - min_ratio) * cosine

    return factor


def make_scheduler(cfg):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=cfg.lr)
    return LambdaLR(optimizer, cosine_with_floor(cfg))


def rate_at(scheduler, step):
    return float(scheduler.base_lrs[0] * scheduler.lr_lambdas[0](step))


CONFIG = TrainConfig()

subject = Subject(
    kind="schedule",
    name="cosine with a floor",
    build=lambda c: make_scheduler(CONFIG),
    forward=rate_at,
    declares={
        "schedule": "cosine",
        "warmup_steps": CONFIG.warmup,
        "total_steps": CONFIG.max_steps,
        "peak": CONFIG.lr,
        "floor": CONFIG.min_lr,
    },
)
