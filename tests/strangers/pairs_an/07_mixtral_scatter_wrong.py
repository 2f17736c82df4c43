WHAT = 'experts overwrite one another: the output of an expert is assigned to its tokens, not added, so only the chosen expert with the highest number counts (line 78: final[token] = weights[token, slot, None] * expert(flat[token]))'
"""Mixtral: sparse mixture of experts, each token to two of four, in a decoder with rotary positions."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

NUM_EXPERTS, TOP_K = 4, 2


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


class Rotary:
    @staticmethod
    def turn(x):
        d = x.size(-1)
        t = torch.arange(x.size(-2), device=x.device, dtype=torch.float64)
        f = torch.pow(10000.0, -torch.arange(0, d, 2, device=x.device, dtype=torch.float64) / d)
        emb = torch.outer(t, f).repeat(1, 2)
        turned = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * emb.cos().to(x.dtype) + turned * emb.sin().to(x.dtype)


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        assert (dim // heads) % 2 == 0, "even heads only"
        self.heads = heads
        self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)

    def forward(self, x, attn_mask):
        b, n, d = x.shape
        q, k, v = (z.reshape(b, n, self.heads, -1).transpose(1, 2) for z in self.to_qkv(x).chunk(3, dim=-1))
        out = F.scaled_dot_product_attention(Rotary.turn(q), Rotary.turn(k), v, attn_mask=attn_mask)
        return self.to_out(out.transpose(1, 2).reshape(b, n, d))


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class SparseMoe(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, NUM_EXPERTS, bias=False)
        self.experts = nn.ModuleList([Expert(dim, hidden) for _ in range(NUM_EXPERTS)])

    def route(self, x):
        weights = F.softmax(self.gate(x), dim=-1)
        weights, chosen = torch.topk(weights, TOP_K, dim=-1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, hidden_states):
        batch, length, dim = hidden_states.shape
        flat = hidden_states.reshape(-1, dim)
        weights, chosen = self.route(flat)
        final = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel() == 0:
                continue
            final[token] = weights[token, slot, None] * expert(flat[token])
        return final.view(batch, length, dim)


class MixtralLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(dim), RMSNorm(dim)
        self.attn = SelfAttention(dim, heads)
        self.block_sparse_moe = SparseMoe(dim, hidden)

    def forward(self, x, attn_mask):
        x = x + self.attn(self.norm1(x), attn_mask)
        return x + self.block_sparse_moe(self.norm2(x))


class Mixtral(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([MixtralLayer(dim, heads, hidden) for _ in range(depth)])
        self.norm = RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, attention_mask=None):
        n = tokens.size(1)
        attn_mask = torch.ones(n, n, dtype=torch.bool, device=tokens.device).tril()
        if attention_mask is not None:
            attn_mask = attn_mask & attention_mask[:, None, None, :]
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, attn_mask)
        return self.head(self.norm(x))


def router(model, x):
    weights, chosen = model.layers[0].block_sparse_moe.route(x)
    return torch.zeros(*x.shape[:-1], NUM_EXPERTS, dtype=weights.dtype, device=x.device).scatter(-1, chosen, weights)


subject = Subject(
    kind="decoder",
    name="Mixtral",
    build=lambda c: Mixtral(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    router=router,
    declares={
        "positions": "rotary", "layout": "halves", "norm": "rms", "norm_placement": "pre", "final_norm": True,
        "norm_topk_prob": True, "bias": False, "structure": "other", "padding_side": "right",
    },
)
