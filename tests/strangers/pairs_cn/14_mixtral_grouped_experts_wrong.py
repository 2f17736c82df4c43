"""A Mixtral-like layer; tokens are sorted by expert so that each expert runs once over a contiguous slice."""
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import Subject


class GroupedExperts(nn.Module):
    def __init__(self, dim, hidden, experts=4, k=2):
        super().__init__()
        self.k, self.num = k, experts
        self.gate = nn.Linear(dim, experts, bias=False)
        self.up = nn.ModuleList(nn.Linear(dim, hidden, bias=False) for _ in range(experts))
        self.down = nn.ModuleList(nn.Linear(hidden, dim, bias=False) for _ in range(experts))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        best, chosen = self.gate(flat).topk(self.k, dim=-1)
        weights = best.softmax(-1).reshape(-1)  # one a (token, slot)
        expert_of = chosen.reshape(-1)

        order = expert_of.argsort(stable=True)
        token_of = order // self.k
        sizes = torch.bincount(expert_of, minlength=self.num).tolist()
        parts = flat[token_of].split(sizes)
        done = torch.cat([self.down[e](F.silu(self.up[e](part))) for e, part in enumerate(parts)])

        done = done * weights[:, None]
        return torch.zeros_like(flat).index_add(0, token_of, done.to(flat.dtype)).reshape(x.shape)


class MixtralLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.moe = GroupedExperts(dim, hidden)

    def attend(self, x, mask):
        b, t, d = x.shape
        q, k, v = (y.reshape(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
        weights = scores.softmax(-1)
        if mask is not None:
            weights = weights.masked_fill(~mask[:, None, None], 0.0)
        return self.out((weights @ v).transpose(1, 2).reshape(b, t, d))

    def forward(self, x, mask=None):
        x = x + self.attend(self.input_norm(x), mask)
        return x + self.moe(self.post_norm(x))


subject = Subject(
    kind="layer",
    name="Mixtral-like layer",
    build=lambda c: MixtralLayer(c.d_model, c.num_heads, c.d_ff),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    declares={
        "causal": False,
        "positions": "none",
        "norm": "rms",
        "norm_placement": "pre",
        "bias": False,
        "structure": "other",
    },
)

WHAT = (
    'Line 28: the outputs of the experts stand in the order sorted by expert, the weights still in the order of the tokens: each output is weighted with the weight of another token or slot.'
)
