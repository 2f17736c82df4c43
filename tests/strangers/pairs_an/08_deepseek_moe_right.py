"""DeepSeekMoE: a shared expert beside routed ones; tokens are sorted by expert, and each expert runs once."""
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from veriformer.properties import Subject

ROUTED, ACTIVE = 5, 2


class MLP(nn.Module):
    def __init__(self, dim: int, inter: int):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, inter, bias=False), nn.Linear(inter, dim, bias=False), nn.Linear(dim, inter, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Gate(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROUTED, dim) * dim**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = F.linear(x, self.weight).softmax(dim=-1)
        weights, indices = scores.topk(ACTIVE, dim=-1)
        return weights / weights.sum(dim=-1, keepdim=True), indices


class MoE(nn.Module):
    def __init__(self, dim: int, inter: int):
        super().__init__()
        self.gate = Gate(dim)
        self.experts = nn.ModuleList(MLP(dim, inter) for _ in range(ROUTED))
        self.shared = MLP(dim, inter)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        weights, indices = self.gate(x)
        order = indices.flatten().argsort(stable=True)  # slots (token * ACTIVE + choice), by expert
        tokens = order // ACTIVE
        counts = torch.bincount(indices.flatten(), minlength=ROUTED).tolist()
        parts = [expert(part) for expert, part in zip(self.experts, x[tokens].split(counts)) if len(part)]
        routed = torch.cat(parts) * weights.flatten()[order, None]
        y = torch.zeros_like(x).index_add(0, tokens, routed)
        return (y + self.shared(x)).view(shape)


class Attention(nn.Module):
    def __init__(self, dim: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.wq, self.wk = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wv, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.n_heads, -1)) for f in (self.wq, self.wk, self.wv))
        scores = torch.einsum("bshd,bthd->bsht", q, k) * q.shape[-1] ** -0.5
        scores = (scores + mask.unsqueeze(-2).to(x.dtype)).softmax(dim=-1)
        return self.wo(torch.einsum("bsht,bthd->bshd", scores, v).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, n_heads: int, inter: int, dense: bool):
        super().__init__()
        self.attn = Attention(dim, n_heads)
        self.ffn = MLP(dim, inter) if dense else MoE(dim, inter)
        self.attn_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-6), nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), mask)
        return x + self.ffn(self.ffn_norm(x))


class Transformer(nn.Module):
    def __init__(self, vocab: int, dim: int, n_heads: int, n_layers: int, inter: int, max_seq_len: int):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_seq_len, dim)
        # the first layer is dense, unless it is the only one
        self.layers = nn.ModuleList(Block(dim, n_heads, inter, dense=i == 0 < n_layers - 1) for i in range(n_layers))
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        seqlen = tokens.shape[1]
        h = self.embed(tokens) + self.pos(torch.arange(seqlen, device=tokens.device))
        mask = torch.full((seqlen, seqlen), float("-inf"), device=tokens.device).triu(1)
        for layer in self.layers:
            h = layer(h, mask)
        return self.head(self.norm(h))


def router(model, x):
    gate = model.layers[-1].ffn.gate
    weights, indices = gate(x)
    return x.new_zeros(*x.shape[:-1], ROUTED).scatter(-1, indices, weights)


subject = Subject(
    kind="decoder",
    name="DeepSeekMoE",
    build=lambda c: Transformer(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    router=router,
    declares={
        "positions": "learned", "norm": "rms", "norm_placement": "pre", "final_norm": True, "bias": False,
        "norm_topk_prob": True, "structure": "other", "tied": False,
    },
)
