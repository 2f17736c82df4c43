"""T5's one-sided relative bias: the future all falls into bucket 0."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

class Bias(nn.Module):
    def __init__(self, c, n=8, far=20):
        super().__init__()
        self.table, self.n, self.far = nn.Embedding(n, c.num_heads), n, far

    def bucket(self, dist):
        exact = self.n // 2
        dist = dist.clamp(min=0)
        ratio = torch.log(dist.clamp(min=1).double() / exact) / math.log(self.far / exact)
        large = (exact + (ratio * (self.n - exact)).long()).clamp(max=self.n - 1)
        return torch.where(dist < exact, dist, large)

    def forward(self, q, k):
        dist = torch.arange(q)[:, None] - torch.arange(k)[None]
        return self.table(self.bucket(dist).to(self.table.weight.device)).permute(2, 0, 1)

common = dict(kind="position_bias", build=Bias, forward=lambda m, q, k: m(q, k))
undeclared = Subject(**common)
declared = Subject(**common, declares={"positions": "t5", "bidirectional": False, "num_buckets": 8, "max_distance": 20})
