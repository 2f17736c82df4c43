import torch
from torch import nn
from veriformer.properties import DrawnConfig, Subject

IGNORE = -100
COEFFICIENT = 0.01


class CausalLMLoss(nn.Module):
    """Cross entropy plus c * log(Z)^2, as in PaLM; the mean over what is to be predicted."""

    def __init__(self, coefficient=COEFFICIENT, ignore_index=IGNORE):
        super().__init__()
        self.coefficient = coefficient
        self.ignore_index = ignore_index

    def forward(self, logits, labels):
        logits = logits.reshape(-1, logits.size(-1))
        labels = labels.reshape(-1)
        counted = labels != self.ignore_index
        total = counted.sum().clamp(min=1)

        log_z = torch.logsumexp(logits, dim=-1)
        target = labels.masked_fill(~counted, 0)
        picked = logits.gather(-1, target[:, None]).squeeze(-1)

        nll = (log_z - picked).masked_fill(~counted, 0.0).sum() / total
        z = log_z.square()
        z = z.masked_fill(~counted, 0.0).sum() / total
        return nll + self.coefficient * z


def build(c):
    return CausalLMLoss()


def forward(model, logits, labels):
    return model(logits, labels)


subject = Subject(
    kind="loss",
    name="cross entropy with z-loss",
    build=build,
    forward=forward,
    declares={"ignore_index": IGNORE, "z_loss": COEFFICIENT, "empty_loss": "zero"},
)
