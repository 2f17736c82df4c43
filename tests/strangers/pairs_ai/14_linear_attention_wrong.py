WHAT = "the normaliser of causal linear attention sums the keys of the whole sequence, not those up to t: each output is divided by a number that knows the future: line 18"
"""Causal linear attention (Katharopoulos et al., 2020) in a pre-norm language model, by einsum."""
import torch
from torch import einsum, nn
from torch.nn import functional as F

from veriformer.properties import Subject


def phi(x):
    return F.elu(x) + 1


def causal_linear_attention(q, k, v, eps=1e-6):
    """q, k: b h t d; v: b h t e. sum_{s<=t} phi(q_t).phi(k_s) v_s over sum_{s<=t} phi(q_t).phi(k_s)."""
    q, k = phi(q), phi(k)
    kv = einsum("bhtd,bhte->bhtde", k, v).cumsum(dim=2)
    norm = k.sum(dim=2, keepdim=True)
    denominator = (q * norm).sum(dim=-1) + eps
    return einsum("bhtd,bhtde->bhte", q, kv) / denominator[..., None]


class Mixer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.to_qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.to_out(causal_linear_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(dim), fn

    def forward(self, x):
        return self.fn(self.norm(x)) + x


class LinearTransformerLM(nn.Module):
    def __init__(self, num_tokens, dim, heads, depth, hidden, max_seq_len):
        super().__init__()
        self.token_emb, self.pos_emb = nn.Embedding(num_tokens, dim), nn.Embedding(max_seq_len, dim)
        sublayers = []
        for _ in range(depth):
            sublayers.append(PreNorm(dim, Mixer(dim, heads)))
            sublayers.append(PreNorm(dim, nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))))
        self.net = nn.Sequential(*sublayers)
        self.norm, self.to_logits = nn.LayerNorm(dim), nn.Linear(dim, num_tokens)

    def forward(self, tokens):
        x = self.token_emb(tokens) + self.pos_emb(torch.arange(tokens.shape[1], device=tokens.device))
        return self.to_logits(self.norm(self.net(x)))


subject = Subject(
    kind="decoder",
    name="LinearTransformerLM",
    build=lambda c: LinearTransformerLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens: m(tokens),
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "structure": "other",
    },
)
