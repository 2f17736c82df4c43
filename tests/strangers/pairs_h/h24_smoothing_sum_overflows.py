"""fairseq's `label_smoothed_nll_loss` as fine-tuning scripts copy it: negative log-likelihood plus the mean over the
vocabulary of minus the log-probabilities."""

import torch

from veriformer.properties import Subject

WHAT = (
    "Log-probabilities stay in the dtype of the logits while they are summed over the vocabulary. In float16 the sum "
    "passes 65504 with some 6,500 words (a mean of -10 each), and the loss is infinite. In float32 and "
    "bfloat16, and with small vocabularies, nothing is seen."
)
PLACE = "log_probs_wrong: no float() before log_softmax"
EPSILON, IGNORE = 0.1, -100


def log_probs_right(logits):
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def log_probs_wrong(logits):
    return logits.log_softmax(-1)


def make(log_probs):
    def label_smoothed_nll_loss(model, logits, labels):
        lprobs = log_probs(logits).flatten(0, -2)
        target = labels.flatten()
        counted = target != IGNORE
        safe = target.masked_fill(~counted, 0)
        nll = -lprobs.gather(-1, safe[:, None]).squeeze(-1)
        smooth = -lprobs.sum(-1)
        nll, smooth = (x.masked_fill(~counted, 0).to(torch.promote_types(x.dtype, torch.float32)) for x in (nll, smooth))
        loss = (1 - EPSILON) * nll.sum() + EPSILON / lprobs.shape[-1] * smooth.sum()
        return (loss / counted.sum().clamp(min=1)).to(logits.dtype)

    return Subject(
        kind="loss",
        name="label-smoothed loss",
        forward=label_smoothed_nll_loss,
        declares={"label_smoothing": EPSILON, "ignore_index": IGNORE, "empty_loss": "zero", "half_precision": True},
    )


right, wrong = make(log_probs_right), make(log_probs_wrong)


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.01), (torch.float16, 0.002)):
        for vocab in (11, 300, 4000, 9000, 32000):
            logits = (torch.randn(2, 5, vocab) * 2).to(dtype)
            labels = torch.randint(0, vocab, (2, 5))
            labels[1, 3:] = IGNORE
            p = logits.double().exp() / logits.double().exp().sum(-1, keepdim=True)
            kept = labels >= 0
            soft = torch.full((int(kept.sum()), vocab), EPSILON / vocab, dtype=torch.float64)
            soft[torch.arange(len(soft)), labels[kept]] += 1 - EPSILON
            truth = -(soft * p[kept].log()).sum(-1).mean()
            a, b = (f.forward(None, logits, labels).double() for f in (right, wrong))
            print(dtype, vocab, f"truth {truth:.4f} right {a:.4f} wrong {b:.4f}")
            assert (a - truth).abs() < bound * truth
            assert not b.isfinite() if dtype == torch.float16 and vocab > 8000 else (b - truth).abs() < 3 * bound * truth
            x = logits.clone().requires_grad_()
            right.forward(None, x, labels).backward()
            expected = torch.zeros_like(p)
            expected[kept] = (p[kept] - soft) / len(soft)
            assert (x.grad.double() - expected).abs().max() < 2 * bound
    assert right.forward(None, logits, torch.full_like(labels, IGNORE)) == 0
