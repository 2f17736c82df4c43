"""FLASH-quad (Hua et al. 2022): gated attention units with squared ReLU scores, as a language model."""

import torch
from torch import einsum, nn
from torch.nn.functional import silu

from veriformer.properties import Subject


class GAU(nn.Module):
    def __init__(self, dim, key_dim=16, expansion=2):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.to_vg = nn.Linear(dim, 2 * expansion * dim)
        self.to_z = nn.Linear(dim, key_dim)
        self.gamma = nn.Parameter(torch.ones(2, key_dim) + 0.1 * torch.randn(2, key_dim))
        self.beta = nn.Parameter(0.1 * torch.randn(2, key_dim))
        self.to_out = nn.Linear(expansion * dim, dim)

    def forward(self, x):
        n = x.shape[1]
        y = self.norm(x)
        v, gate = silu(self.to_vg(y)).chunk(2, dim=-1)
        z = einsum("bnd,hd->bhnd", silu(self.to_z(y)), self.gamma) + self.beta[:, None, :]
        q, k = z.unbind(1)
        kernel = torch.relu(einsum("bid,bjd->bij", q, k) * q.shape[-1] ** -0.5).square()
        kernel = kernel.tril() / n
        return x + self.to_out(gate * einsum("bij,bje->bie", kernel, v))


class Flash(nn.Module):
    def __init__(self, vocab, dim, depth, longest):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.where = nn.Parameter(0.02 * torch.randn(longest, dim))
        self.units = nn.Sequential(*[GAU(dim) for _ in range(2 * depth)])
        self.norm = nn.LayerNorm(dim)
        self.logits = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        if ids.shape[1] > len(self.where):
            raise ValueError("too long")
        return self.logits(self.norm(self.units(self.embed(ids) + self.where[: ids.shape[1]])))


subject = Subject(
    kind="decoder",
    build=lambda c: Flash(c.vocab_size, c.d_model, c.num_layers, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={"positions": "learned"},
)

WHAT = "Line 27: the squared scores are divided by the length of the whole sequence, where in a causal model each query must divide by the number of keys that it sees: outputs of a prefix change as the sequence grows."
