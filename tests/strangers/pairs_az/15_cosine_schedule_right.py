"""The learning rate of a pretraining run: linear warm-up, then a cosine down to a tenth."""

import math

from veriformer.properties import Subject

learning_rate = 6e-4
min_lr = 6e-5
warmup_iters = 20
lr_decay_iters = 200


def get_lr(it):
    # 1) linear warmup for warmup_iters steps
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    # 2) if it > lr_decay_iters, return min learning rate
    if it > lr_decay_iters:
        return min_lr
    # 3) in between, use cosine decay down to min learning rate
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


subject = Subject(
    kind="schedule",
    name="cosine to a tenth",
    build=lambda c: get_lr,
    forward=lambda m, step: float(m(step)),
    declares={
        "schedule": "cosine",
        "warmup_steps": warmup_iters,
        "total_steps": lr_decay_iters,
        "peak": learning_rate,
        "floor": min_lr,
    },
)
