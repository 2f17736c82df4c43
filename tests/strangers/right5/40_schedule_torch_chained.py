WHAT = "cosine with warm-up that really steps torch's own chained schedulers (LinearLR, then CosineAnnealingLR) and writes the rates down; past the last step the floor is kept, where torch would rise again"
import warnings

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

WARMUP, TOTAL, PEAK, FLOOR = 10, 100, 3e-4, 3e-5


class Rates:
    def __init__(self):
        self.optimizer = torch.optim.SGD([torch.zeros((), requires_grad=True)], lr=PEAK)
        rise = LinearLR(self.optimizer, start_factor=1 / (WARMUP + 1), total_iters=WARMUP)
        fall = CosineAnnealingLR(self.optimizer, TOTAL - WARMUP, eta_min=FLOOR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.chain = SequentialLR(self.optimizer, [rise, fall], milestones=[WARMUP])
        self.seen = [self.optimizer.param_groups[0]["lr"]]

    def __call__(self, step):
        step = min(int(step), TOTAL)
        while len(self.seen) <= step:
            self.optimizer.step()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.chain.step()
            self.seen.append(float(self.optimizer.param_groups[0]["lr"]))
        return self.seen[step]


from veriformer.properties import Subject


def build(c):
    return Rates()


def forward(model, step):
    return model(step)


undeclared = Subject(kind="schedule", build=build, forward=forward)
declared = Subject(
    kind="schedule", name="torch's chain", build=build, forward=forward,
    declares={"schedule": "cosine", "warmup_steps": WARMUP, "total_steps": TOTAL, "peak": PEAK, "floor": FLOOR},
)
