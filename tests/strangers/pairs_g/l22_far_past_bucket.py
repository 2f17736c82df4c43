"""T5's relative position bias, for an encoder (both directions), 32 buckets up to distance 128."""

import math

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = (
    "Buckets are clamped once, to the last of all 32, after the half for later keys has been added; keys 128 and more "
    "positions back therefore run over from the past's 16 buckets into those of the future (later keys saturate as they should)."
)
PLACE = "bucket_clamped_last"

NUM_BUCKETS = 32
MAX_DISTANCE = 128


def log_bucket(distance, per_side):
    """Exact up to half of the buckets, then logarithmic; not limited yet."""
    exact = per_side // 2
    far = exact + (torch.log(distance.clamp(min=1).float() / exact) / math.log(MAX_DISTANCE / exact) * (per_side - exact)).long()
    return torch.where(distance < exact, distance, far)


def bucket_clamped_first(relative):
    per_side = NUM_BUCKETS // 2
    bucket = log_bucket(relative.abs(), per_side).clamp(max=per_side - 1)
    return bucket + (relative > 0) * per_side


def bucket_clamped_last(relative):
    per_side = NUM_BUCKETS // 2
    bucket = log_bucket(relative.abs(), per_side)
    return (bucket + (relative > 0) * per_side).clamp(max=NUM_BUCKETS - 1)


class RelativeBias(nn.Module):
    def __init__(self, heads, bucket):
        super().__init__()
        self.relative_attention_bias = nn.Embedding(NUM_BUCKETS, heads)
        self.bucket = bucket

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        relative = torch.arange(key_len, device=device)[None, :] - torch.arange(query_len, device=device)[:, None]
        return self.relative_attention_bias(self.bucket(relative)).permute(2, 0, 1)


def subject(bucket, name):
    return Subject(
        kind="position_bias",
        build=lambda c: RelativeBias(c.num_heads, bucket),
        forward=lambda m, query_len, key_len: m(query_len, key_len),
        name=name,
        declares={
            "positions": "t5",
            "bidirectional": True,
            "num_buckets": NUM_BUCKETS,
            "max_distance": MAX_DISTANCE,
            "beyond_max_len": "works",
        },
    )


right = subject(bucket_clamped_first, "t5-bias")
wrong = subject(bucket_clamped_last, "t5-bias-clamped-last")


def reference(table, query_len, key_len):
    # from 8 on, 8 * 16 ** (i / 8) <= n, without rounding: 8 ** 8 * 16 ** i <= n ** 8
    place = [n if n < 8 else min(15, 8 + max(i for i in range(32) if 8**8 * 16**i <= n**8)) for n in range(query_len + key_len)]
    rows = [[place[abs(s - t)] + (16 if s > t else 0) for s in range(key_len)] for t in range(query_len)]
    return table[torch.tensor(rows)].permute(2, 0, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = RelativeBias(3, bucket_clamped_first), RelativeBias(3, bucket_clamped_last)
    bad.load_state_dict(good.state_dict())
    table = good.relative_attention_bias.weight.detach().double()
    with torch.no_grad():
        for q, k, same in [(1, 1, True), (7, 12, True), (60, 40, True), (128, 128, True), (100, 200, True), (129, 20, False), (220, 220, False)]:
            want = reference(table, q, k)
            assert torch.equal(good(q, k).double(), want)
            off = (bad(q, k) - want).abs().max()
            assert (off == 0) == same and (same or off > 0.05), (q, k, off)
        far = torch.arange(-3000, 3001)
        assert int(bucket_clamped_first(far).max()) == 31 and int(bucket_clamped_last(far).max()) == 31
        assert torch.equal(bucket_clamped_first(far[far > -128]), bucket_clamped_last(far[far > -128]))
        assert (bucket_clamped_first(far[far <= -128]) != bucket_clamped_last(far[far <= -128])).all()
    print("ok", __file__)
