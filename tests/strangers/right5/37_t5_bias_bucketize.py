WHAT = "T5's bucketed bias without a logarithm at run time: bucket borders found once in whole numbers (smallest n with n ** 8 >= 8 ** 8 * 16 ** k) and searched by torch.bucketize"
import torch
from torch import nn

BUCKETS, FAR = 32, 128


def borders():
    half, exact = BUCKETS // 2, BUCKETS // 4
    steps, ratio = half - exact, FAR // exact
    out = list(range(1, exact + 1))
    for k in range(1, steps):
        n = exact
        while n**steps < exact**steps * ratio**k:
            n += 1
        out.append(n)
    return out


class Bias(nn.Module):
    def __init__(self, h):
        super().__init__()
        self.table = nn.Parameter(torch.randn(h, 2, BUCKETS // 2))  # [head, past or future, distance]
        self.register_buffer("borders", torch.tensor(borders()), persistent=False)

    def forward(self, queries, keys):
        far = torch.arange(keys, device=self.borders.device) - torch.arange(queries, device=self.borders.device)[:, None]
        return self.table[:, (far > 0).long(), torch.bucketize(far.abs(), self.borders, right=True)]


from veriformer.properties import Subject


def build(c):
    return Bias(c.num_heads)


def forward(model, query_len, key_len):
    return model(query_len, key_len)


undeclared = Subject(kind="position_bias", build=build, forward=forward)
declared = Subject(
    kind="position_bias", name="t5 by borders", build=build, forward=forward,
    declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FAR, "beyond_max_len": "works"},
)
