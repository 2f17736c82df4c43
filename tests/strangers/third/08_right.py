import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedSelfAttention(nn.Module):
    """Multi-head self attention for autoregressive models.

    in:  (batch, seq, dim)
    out: (batch, seq, dim)
    """

    def __init__(self, dim: int = 32, n_heads: int = 4, max_seq: int = 128, p: float = 0.0):
        super().__init__()
        if dim % n_heads:
            raise ValueError("dim must be divisible by n_heads")
        self.dim = dim
        self.n_heads = n_heads
        self.d = dim // n_heads
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)
        self.drop = nn.Dropout(p)
        future = torch.ones(max_seq, max_seq).triu(1).bool()
        self.register_buffer("future", future, persistent=False)

    def _heads(self, x):
        b, n, _ = x.shape
        return x.reshape(b, n, self.n_heads, self.d).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        q, k, v = (self._heads(f(x)) for f in (self.to_q, self.to_k, self.to_v))
        sim = torch.einsum("bhid,bhjd->bhij", q, k) / self.d ** 0.5
        sim.masked_fill_(self.future[:n, :n], torch.finfo(sim.dtype).min)
        attn = self.drop(F.softmax(sim, dim=-1))
        out = torch.einsum("bhij,bhjd->bihd", attn, v)
        return self.to_out(out.reshape(b, n, self.dim))
