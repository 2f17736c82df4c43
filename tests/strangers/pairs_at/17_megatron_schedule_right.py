import math

from veriformer.properties import Subject


class OptimizerParamScheduler:
    """Megatron's annealing: linear warm-up from zero, then a cosine from max_lr to min_lr, then min_lr."""

    def __init__(self, max_lr, min_lr, lr_warmup_steps, lr_decay_steps):
        assert 0.0 <= min_lr <= max_lr
        assert 0 <= lr_warmup_steps < lr_decay_steps
        self.max_lr = float(max_lr)
        self.min_lr = min_lr
        self.lr_warmup_steps = lr_warmup_steps
        self.lr_decay_steps = lr_decay_steps

    def get_lr(self, num_steps):
        if self.lr_warmup_steps > 0 and num_steps <= self.lr_warmup_steps:
            return self.max_lr * num_steps / self.lr_warmup_steps
        if num_steps > self.lr_decay_steps:
            return self.min_lr
        num_steps_ = num_steps - self.lr_warmup_steps
        decay_steps_ = self.lr_decay_steps - self.lr_warmup_steps
        decay_ratio = num_steps_ / decay_steps_
        assert 0.0 <= decay_ratio <= 1.0
        coeff = 0.5 * (math.cos(math.pi * decay_ratio) + 1.0)
        return self.min_lr + coeff * (self.max_lr - self.min_lr)


subject = Subject(
    kind="schedule",
    name="Megatron cosine annealing",
    build=lambda c: OptimizerParamScheduler(max_lr=3e-4, min_lr=3e-5, lr_warmup_steps=20, lr_decay_steps=200),
    forward=lambda model, step: model.get_lr(step),
    declares={"schedule": "cosine", "warmup_steps": 20, "total_steps": 200, "peak": 3e-4, "floor": 3e-5},
)
