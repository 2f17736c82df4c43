"""The learning rate of nanoGPT's train.py: linear warmup, cosine decay, a floor."""

import math

from veriformer.properties import Subject

# adamw optimizer
learning_rate = 6e-4  # max learning rate
min_lr = 6e-5  # minimum learning rate, should be ~= learning_rate/10 per Chinchilla
# learning rate decay settings
warmup_iters = 20  # how many steps to warm up for
lr_decay_iters = 200  # should be ~= max_iters per Chinchilla


# learning rate decay scheduler (cosine with warmup)
def get_lr(it):
    # 1) linear warmup for warmup_iters steps
    if it < warmup_iters:
        return learning_rate * it / warmup_iters
    # 2) if it > lr_decay_iters, return min learning rate
    if it > lr_decay_iters:
        return min_lr
    # 3) in between, use cosine decay down to min learning rate
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    assert 0 <= decay_ratio <= 1
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))  # coeff ranges 0..1
    return min_lr + coeff * (learning_rate - min_lr)


subject = Subject(
    kind="schedule",
    name="nanoGPT get_lr",
    forward=lambda model, step: get_lr(step),
    declares={
        "schedule": "cosine",
        "warmup_steps": 20,
        "total_steps": 200,
        "peak": 6e-4,
        "floor": 6e-5,
        "first_step": 0,
    },
)
