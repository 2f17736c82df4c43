"""A small sparse language model: every feed-forward network is a mixture of four experts, two for each token."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

IGNORE = -100


class Expert(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMoe(nn.Module):
    def __init__(self, hidden_size, intermediate_size, num_experts=4, top_k=2):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.experts = nn.ModuleList([Expert(hidden_size, intermediate_size) for _ in range(num_experts)])

    def route(self, x):
        probs = F.softmax(self.gate(x), dim=-1)
        weights, chosen = probs.topk(self.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        return probs, weights, chosen

    def forward(self, hidden):
        B, T, D = hidden.shape
        x = hidden.reshape(-1, D)
        probs, weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == e)
            out = out.index_add(0, token, (expert(x[token]) * weights[token, slot, None]).to(out.dtype))
        return out.view(B, T, D), probs, chosen


class Attention(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, hidden_size // num_heads
        self.q_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.k_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.v_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        self.o_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, x, allowed):
        B, T, D = x.shape
        q, k, v = (p(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        scores = torch.matmul(q, k.transpose(2, 3)) * self.head_dim**-0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        out = torch.matmul(scores.softmax(-1), v)
        return self.o_proj(out.transpose(1, 2).reshape(B, T, D))


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads, intermediate_size):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.self_attn = Attention(hidden_size, num_heads)
        self.post_attention_layernorm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.block_sparse_moe = SparseMoe(hidden_size, intermediate_size)

    def forward(self, x, allowed):
        x = x + self.self_attn(self.input_layernorm(x), allowed)
        y, probs, chosen = self.block_sparse_moe(self.post_attention_layernorm(x))
        return x + y, probs, chosen


class MoeForCausalLM(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers, num_heads, intermediate_size, max_positions, aux_coef=0.01):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.embed_positions = nn.Embedding(max_positions, hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)])
        self.norm = nn.RMSNorm(hidden_size, eps=1e-5)
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.aux_coef = aux_coef

    def run(self, tokens, attention_mask=None):
        T = tokens.shape[1]
        allowed = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()[None, None]
        if attention_mask is not None:
            allowed = allowed & attention_mask[:, None, None, :]
        x = self.embed_tokens(tokens) + self.embed_positions(torch.arange(T, device=tokens.device))
        balance = []
        for layer in self.layers:
            x, probs, chosen = layer(x, allowed)
            moe = layer.block_sparse_moe
            share = F.one_hot(chosen, moe.num_experts).to(probs.dtype).sum(1).mean(0) / moe.top_k
            balance.append(moe.num_experts * (share * probs.mean(0)).sum())
        return self.lm_head(self.norm(x)), torch.stack(balance).mean()

    def forward(self, tokens, attention_mask=None, labels=None):
        logits, balance = self.run(tokens, attention_mask)
        if labels is None:
            return logits
        shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORE)
        nll = F.cross_entropy(logits.flatten(0, 1), shifted.flatten(), ignore_index=IGNORE)
        return nll + self.aux_coef * balance


def router(model, x):
    moe = model.layers[0].block_sparse_moe
    probs, weights, chosen = moe.route(x)
    return torch.zeros_like(probs).scatter(-1, chosen, weights)


subject = Subject(
    kind="decoder",
    name="sparse lm",
    build=lambda c: MoeForCausalLM(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    router=router,
    loss=lambda m, tokens, labels: m(tokens, labels=labels),
    declares={
        "causal": True,
        "positions": "learned",
        "beyond_max_len": "error",
        "norm": "rms",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "swiglu",
        "bias": False,
        "output_bias": False,
        "tied": False,
        "embedding_scale": False,
        "norm_topk_prob": True,
        "shared_layers": False,
        "batch_coupled": False,
        "structure": "other",
        "padding_side": "right",
        "shifts_labels": True,
        "plain_loss": False,
    },
)
