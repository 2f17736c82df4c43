from types import SimpleNamespace
import torch
from veriformer.properties import Subject

WHAT = ("which positions are to be predicted is drawn once per column and broadcast over the batch, so all samples of a batch hide "
        "the same positions (the share is right on average, samples are not independent)")
PLACE = "Masker.__call__: shape of the random numbers of the selection, (T,) for (B, T)"
PAD, CLS, SEP, MASK = 0, 1, 2, 3


class Masker:
    def __init__(self, vocab, columns, p=0.15):
        self.vocab, self.columns, self.p = vocab, columns, p

    def __call__(self, tokens, seed):
        g = torch.Generator().manual_seed(int(seed))
        shape = tokens.shape[1:] if self.columns else tokens.shape
        chosen = torch.rand(shape, generator=g) < self.p
        chosen = chosen & (tokens > MASK)                                    # 0..3 are special
        labels = tokens.masked_fill(~chosen, -100)
        dice = torch.rand(tokens.shape, generator=g)
        other = torch.randint(MASK + 1, self.vocab, tokens.shape, generator=g)
        inputs = torch.where(chosen & (dice < 0.8), torch.full_like(tokens, MASK), tokens)
        inputs = torch.where(chosen & (dice >= 0.9), other.to(tokens), inputs)
        return inputs, labels


def _make(columns):
    return Subject(kind="masking", build=lambda c: Masker(c.vocab_size, columns), forward=lambda m, tokens, seed: m(tokens, seed),
                   declares={"mask_id": MASK, "special_ids": (PAD, CLS, SEP, MASK), "mask_probability": 0.15, "ignore_index": -100},
                   domain={"vocab_size": [30, 50, 100]})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    c = SimpleNamespace(vocab_size=30)
    x = torch.randint(4, 30, (2, 50), generator=torch.Generator().manual_seed(0)); x[:, 0], x[:, -1] = CLS, SEP
    stats = {}
    for name, s in (("right", right), ("wrong", wrong)):
        m, both, share, kinds = s.build(c), 0.0, 0.0, torch.zeros(3)
        for seed in range(400):
            i, l = m(x, seed); hit = l != -100
            assert (l[hit] == x[hit]).all() and not hit[:, [0, -1]].any() and torch.equal(i[~hit], x[~hit])
            assert torch.equal(m(x, seed)[0], i)
            share += hit[:, 1:-1].float().mean().item() / 400; both += hit.all(0)[1:-1].float().mean().item() / 400
            kinds += torch.stack([(i[hit] == MASK).sum(), ((i[hit] != MASK) & (i[hit] != x[hit])).sum(), (i[hit] == x[hit]).sum()])
        stats[name] = share, both
        print(name, "share", round(share, 3), "hidden in both samples", round(both, 4), "mask/other/same", (kinds / kinds.sum()).tolist())
    assert all(abs(s - 0.15) < 0.015 for s, _ in stats.values())
    assert abs(stats["right"][1] - 0.15 ** 2) < 0.006 and abs(stats["wrong"][1] - 0.15) < 0.015    # p^2 against p
