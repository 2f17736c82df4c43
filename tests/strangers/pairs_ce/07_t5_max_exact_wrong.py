WHAT = "T5 buckets: max_exact is taken from the number of buckets before it is halved for the two directions (max_exact = num_buckets // 2 stands above the halving), so the distances with buckets of their own are twice as many and the logarithmic ones collapse."
import math

import torch
from torch import nn

from veriformer.properties import Subject


def relative_position_bucket(relative_position, bidirectional, num_buckets, max_distance):
    """mesh_tensorflow/transformer/transformer_layers.py, to torch."""
    ret = torch.zeros_like(relative_position)
    n = -relative_position
    max_exact = num_buckets // 2
    if bidirectional:
        num_buckets //= 2
        ret = ret + (n < 0).long() * num_buckets
        n = n.abs()
    else:
        n = n.clamp(min=0)
    is_small = n < max_exact
    ratio = torch.log(n.clamp(min=1).double() / max_exact) / math.log(max_distance / max_exact)
    val_if_large = max_exact + (ratio * (num_buckets - max_exact)).long()
    val_if_large = val_if_large.clamp(max=num_buckets - 1)
    return ret + torch.where(is_small, n, val_if_large)


class RelativeBias(nn.Module):
    def __init__(self, heads, num_buckets=16, max_distance=32, bidirectional=True):
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.relative_attention_bias = nn.Embedding(num_buckets, heads)

    def forward(self, query_len, key_len):
        device = self.relative_attention_bias.weight.device
        rel = torch.arange(key_len, device=device)[None, :] - torch.arange(query_len, device=device)[:, None]
        bucket = relative_position_bucket(rel, self.bidirectional, self.num_buckets, self.max_distance)
        return self.relative_attention_bias(bucket).permute(2, 0, 1)


subject = Subject(
    kind="position_bias",
    name="t5 bias",
    build=lambda c: RelativeBias(c.num_heads),
    forward=lambda m, query_len, key_len: m(query_len, key_len),
    declares={"positions": "t5", "bidirectional": True, "num_buckets": 16, "max_distance": 32},
)
