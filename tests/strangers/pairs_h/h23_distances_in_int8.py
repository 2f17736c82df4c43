"""T5's relative position bias with the matrix of distances kept in one byte each (the buckets of T5 saturate at 128, so a
byte is enough), in the style of an inference library that minds its memory."""

import math

import torch
from torch import nn

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "Distances are cast to int8 without being clamped first: 128 keys to the right wraps to 128 to the left, 200 to the "
    "right is taken for 56 to the left, 256 for the token itself. Up to 128 positions the bias is T5's."
)
PLACE = "narrow_wrong: no clamp before `.to(torch.int8)`"
BUCKETS, FARTHEST = 32, 128


def narrow_right(distance):
    return distance.clamp(-127, 127).to(torch.int8)


def narrow_wrong(distance):
    return distance.to(torch.int8)


def bucket_of(distance):
    """T5's bucket of a distance key - query, both ways."""
    side = BUCKETS // 2
    exact = side // 2
    n = distance.abs()
    far = exact + (torch.log(n.clamp(min=1).double() / exact) / math.log(FARTHEST / exact) * (side - exact)).long()
    return torch.where(distance > 0, side, 0) + torch.where(n < exact, n, far.clamp(max=side - 1))


class RelativeBias(nn.Module):
    def __init__(self, heads, narrow):
        super().__init__()
        self.values, self.narrow = nn.Embedding(BUCKETS, heads), narrow
        nn.init.normal_(self.values.weight)
        self.register_buffer("buckets", bucket_of(torch.arange(-128, 128)), persistent=False)  # of every int8

    def forward(self, query_len, key_len):
        device = self.buckets.device
        distance = torch.arange(key_len, device=device)[None] - torch.arange(query_len, device=device)[:, None]
        return self.values(self.buckets[self.narrow(distance).int() + 128]).permute(2, 0, 1)


def make(narrow):
    return Subject(
        kind="position_bias",
        name="t5 bias in bytes",
        build=lambda c: RelativeBias(c.num_heads, narrow),
        forward=lambda bias, query_len, key_len: bias(query_len, key_len),
        declares={"positions": "t5", "bidirectional": True, "num_buckets": BUCKETS, "max_distance": FARTHEST},
    )


right, wrong = make(narrow_right), make(narrow_wrong)


def t5_bucket(relative, buckets=32, farthest=128):
    """As in mesh-tensorflow and transformers, one distance at a time (float32 logarithm as there)."""
    found, buckets = (buckets // 2 if relative > 0 else 0), buckets // 2
    n, exact = abs(relative), buckets // 2
    if n < exact:
        return found + n
    large = torch.log(torch.tensor(float(n)) / exact) / math.log(farthest / exact) * (buckets - exact)
    return found + min(exact + int(large.long()), buckets - 1)


if __name__ == "__main__":
    torch.manual_seed(0)
    good, bad = right.build(DrawnConfig(num_heads=4)), wrong.build(DrawnConfig(num_heads=4))
    bad.load_state_dict(good.state_dict())
    known = torch.tensor([t5_bucket(d) for d in range(-999, 1000)])
    for q, k in ((1, 5), (30, 30), (128, 128), (129, 129), (20, 300), (400, 400), (1000, 1000)):
        d = torch.arange(k)[None] - torch.arange(q)[:, None]
        truth = good.values.weight[known[d + 999]].permute(2, 0, 1)
        a, b = ((m(q, k) - truth).abs().max().item() for m in (good, bad))
        print((q, k), "right", a, "wrong", b)
        assert a == 0 and (b > 0.1 if k > 128 else b == 0)
        assert (good.double()(q, k) - truth.double()).abs().max() == 0
        good.float()
