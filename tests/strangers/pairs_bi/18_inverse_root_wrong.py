WHAT = 'Behind the warm-up the inverse square root is taken of the steps since its end instead of all steps: the rate is continuous at the peak, but falls to a third within eight steps and stays below the formula by up to sqrt(warmup) (line 17).'
from veriformer.properties import Subject


class InverseSquareRoot:
    """Vaswani et al.: d^-0.5 * min(step^-0.5, step * warmup^-1.5), written with its peak as in fairseq."""

    def __init__(self, d_model, warmup_updates=40):
        self.warmup_updates = warmup_updates
        self.peak_lr = (d_model * warmup_updates) ** -0.5
        self.lr_step = self.peak_lr / warmup_updates
        self.decay_factor = self.peak_lr * warmup_updates**0.5

    def step_update(self, num_updates):
        if num_updates < self.warmup_updates:
            return num_updates * self.lr_step
        return self.peak_lr * (num_updates - self.warmup_updates + 1) ** -0.5


subject = Subject(
    kind="schedule",
    name="inverse square root",
    build=lambda c: InverseSquareRoot(c.d_model),
    forward=lambda m, step: m.step_update(step),
    declares={"schedule": "noam", "warmup_steps": 40, "first_step": 1},
)
