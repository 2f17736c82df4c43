"""fairseq's inverse square root through torch's LambdaLR on a throwaway optimizer: linear to 1e-3 in 20 steps, then peak *
sqrt(20 / step). Unusual: an optimizer is made to read the rate; right, LambdaLR's rate is a function of the step."""
import torch
from torch import nn
from veriformer.properties import Subject
PEAK, WARM = 1e-3, 20


class Schedule(nn.Module):
    def forward(s, step):
        opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
        sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: n / WARM if n < WARM else (WARM / n) ** 0.5)
        rate = sched.base_lrs[0] * sched.lr_lambdas[0](int(step))
        return float(rate)


args = dict(kind="schedule", build=lambda c: Schedule(), forward=lambda m, step: m(step))
undeclared = Subject(**args)
declared = Subject(**args, declares={"schedule": "other", "warmup_steps": WARM, "peak": PEAK})
