"""T5's relative position bias, both directions."""
import math
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "max_exact is computed before the buckets are halved for the two directions, so nothing is left for the logarithmic buckets."
PLACE = "bucket function, order of max_exact and the halving"
N, FAR = 8, 16


def bucket(rel):
    n, side = N // 2, (rel > 0).long() * (N // 2)
    exact = n // 2
    return side + spread(rel.abs(), n, exact)


def bucket_early(rel):
    n, exact = N, N // 2
    n, side = n // 2, (rel > 0).long() * (n // 2)
    return side + spread(rel.abs(), n, exact)


def spread(dist, n, exact):
    far = exact + (torch.log(dist.clamp(min=1).double() / exact) / math.log(FAR / exact) * (n - exact)).long()
    return torch.where(dist < exact, dist, far).clamp(max=n - 1)


class Bias(nn.Module):
    def __init__(self, heads, bucket):
        super().__init__()
        self.table, self.bucket = nn.Embedding(N, heads), bucket

    def forward(self, query_len, key_len):
        dev = self.table.weight.device
        rel = torch.arange(key_len, device=dev)[None] - torch.arange(query_len, device=dev)[:, None]
        return self.table(self.bucket(rel)).permute(2, 0, 1)


def subject(bucket):
    return Subject(kind="position_bias", build=lambda c: Bias(c.num_heads, bucket),
                   forward=lambda m, query_len, key_len: m(query_len, key_len),
                   declares={"positions": "t5", "bidirectional": True, "num_buckets": N, "max_distance": FAR})


right, wrong = subject(bucket), subject(bucket_early)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Bias(2, bucket), Bias(2, bucket_early)
    z.load_state_dict(a.state_dict())

    def naive(rel):  # 4 buckets a side: 0, 1, then 2 * 8^(k/2)
        d = abs(rel)
        b = d if d < 2 else min(3, 2 + int(2 * math.log(d / 2) / math.log(8)))
        return b + 4 * (rel > 0)

    want = torch.stack([torch.stack([a.table.weight[naive(s - t)] for s in range(20)]) for t in range(20)]).permute(2, 0, 1)
    dr, dw = (a(20, 20) - want).abs().max().item(), (z(20, 20) - want).abs()[0, 0]
    print(dr, dw.tolist())
    assert dr == 0 and dw.max() > 1e-2 and dw[:3].max() == 0
