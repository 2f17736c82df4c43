import math

import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("The T5 bucket is clamped to num_buckets - 1 after the offset of the future was added instead of to half - 1 "
        "before it, so far past keys run over into the buckets that belong to the future.")
PLACE = "relative position buckets, the clamp of the logarithmic half"
BUCKETS, FAR = 8, 16


def bucket(relative, buggy=False):
    """relative: key minus query."""
    half = BUCKETS // 2
    exact = half // 2
    offset = (relative > 0).long() * half
    gap = relative.abs()
    grown = torch.log(gap.clamp(min=1).double() / exact) / math.log(FAR / exact) * (half - exact)
    large = exact + (grown + 1e-9).long()  # exact powers must not fall to the bucket below
    if buggy:
        return (offset + torch.where(gap < exact, gap, large)).clamp(max=BUCKETS - 1)
    return offset + torch.where(gap < exact, gap, large.clamp(max=half - 1))


class T5Bias(nn.Module):
    def __init__(self, heads, buggy=False):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, heads)
        self.buggy = buggy

    def forward(self, query_len, key_len):
        at = torch.arange(key_len, device=self.table.weight.device)
        rel = at[None] - torch.arange(query_len, device=at.device)[:, None]
        return self.table(bucket(rel, self.buggy)).permute(2, 0, 1)


FACTS = {"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FAR}
right = Subject(kind="position_bias", build=lambda c: T5Bias(c.num_heads), declares=FACTS, name="t5 bias")
wrong = Subject(kind="position_bias", build=lambda c: T5Bias(c.num_heads, True), declares=FACTS, name="t5 bias")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)

    def naive(rel):
        n = abs(rel)
        if n >= 2:
            n = min(3, next((2 + i for i in range(9) if n < 2 * (FAR / 2) ** ((i + 1) / 2) - 1e-9), 11))
        return n + (4 if rel > 0 else 0)

    a, b = T5Bias(2), T5Bias(2, True)
    b.load_state_dict(a.state_dict())
    L = 40
    want = torch.stack([torch.stack([a.table.weight[naive(j - i)] for j in range(L)]) for i in range(L)]).permute(2, 0, 1)
    gap = [(m(L, L) - want).abs().amax(0) for m in (a, b)]
    rel = torch.arange(L)[None] - torch.arange(L)[:, None]
    print(gap[0].max().item(), gap[1].max().item(), bucket(torch.tensor([-40, -16, -15, 15, 40]), True).tolist())
    assert gap[0].max() == 0 and gap[1][rel > -FAR].max() == 0 and gap[1][rel <= -FAR].min() > 0
