"""The relative bias of a T5 decoder, after mesh-tensorflow's relative_position_bucket."""
import math

import torch
from torch import nn
from veriformer.properties import Subject

BUCKETS, FARTHEST = 32, 128


def bucket_of(distance, num_buckets=BUCKETS, max_distance=FARTHEST):
    """Half of the buckets for exact distances, the others grow by a constant factor up to max_distance."""
    exact = num_buckets // 2
    log_ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    coarse = exact + (log_ratio * num_buckets).long()
    return torch.where(distance < exact, distance, coarse.clamp(max=num_buckets - 1))


class DecoderBias(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, heads)

    def forward(self, query_len, key_len):
        device = self.table.weight.device
        query = torch.arange(query_len, device=device)[:, None]
        key = torch.arange(key_len, device=device)[None, :]
        back = (query - key).clamp(min=0)  # the future is masked elsewhere
        return self.table(bucket_of(back)).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="T5 decoder bias",
    build=lambda c: DecoderBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "num_buckets": BUCKETS, "max_distance": FARTHEST, "bidirectional": False},
)

WHAT = (
    'Line 15: the logarithmic half is stretched over all buckets in place of those that are left, so that distances saturate at 43 in place of 113.'
)
