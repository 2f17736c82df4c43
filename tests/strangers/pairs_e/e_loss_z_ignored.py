"""Cross-entropy with a z-loss that keeps the partition function near one."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The z-loss is averaged over all positions, the ignored ones too, while the cross-entropy is averaged over the counted ones."
PLACE = "mean of the z-loss term"
C = 0.05


class ZLoss(nn.Module):
    def z_mean(self, z, counted, n):
        return (z * counted).sum() / n

    def forward(self, logits, labels):
        counted = labels.ne(-100)
        n = counted.sum().clamp(min=1)
        log_z = logits.logsumexp(-1)
        picked = logits.gather(-1, labels.masked_fill(~counted, 0).unsqueeze(-1)).squeeze(-1)
        nll = torch.where(counted, log_z - picked, torch.zeros_like(log_z)).sum() / n
        return nll + C * self.z_mean(log_z.square(), counted, n)


class EveryPosition(ZLoss):
    def z_mean(self, z, counted, n):
        return z.mean()


def subject(cls):
    return Subject(kind="loss", build=lambda c: cls(), forward=lambda m, logits, labels: m(logits, labels),
                   declares={"z_loss": C, "ignore_index": -100, "label_smoothing": 0.0, "shifts_labels": False,
                             "empty_loss": "zero"})


right, wrong = subject(ZLoss), subject(EveryPosition)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    x, y = 2 * torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    for ignored, clash in ((0, False), (2, True)):
        y[1, 5 - ignored:] = -100
        keep = y != -100
        lz = x[keep].double().exp().sum(-1).log()
        want = (lz - x[keep].double()[torch.arange(len(lz)), y[keep]] + C * lz ** 2).mean()
        dr, dw = ((m(x, y) - want).abs().item() for m in (ZLoss(), EveryPosition()))
        print(ignored, "ignored", dr, dw)
        assert dr < 1e-5 and (dw > 1e-3) == clash
