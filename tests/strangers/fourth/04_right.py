"""GPT-NeoX: attention and feed-forward network side by side, rotations of the first channels alone."""

import torch
from torch import einsum, nn
from torch.nn.functional import cross_entropy, gelu

from veriformer.properties import Subject

ROTARY_DIM = 4


class Rotary(nn.Module):
    def __init__(self, rotary_dim, head_dim, base=10000):
        super().__init__()
        assert rotary_dim <= head_dim and rotary_dim % 2 == 0
        self.rotary_dim, self.head_dim, self.base = rotary_dim, head_dim, base

    def forward(self, x, positions):
        """x: b h t k, the first rotary_dim of k are turned, the rest passes."""
        exponents = torch.arange(0, self.rotary_dim, 2, device=x.device, dtype=torch.float64) / self.rotary_dim
        angles = einsum("t,f->tf", positions.double(), self.base**-exponents)
        cos, sin = (fn(angles).repeat(1, 2).to(x.dtype) for fn in (torch.cos, torch.sin))
        turn, keep = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        first, second = turn.chunk(2, dim=-1)
        turn = turn * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((turn, keep), dim=-1)


class NeoXBlock(nn.Module):
    def __init__(self, dim, heads, hidden, dropout):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.ln_attn, self.ln_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.to_out = nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.rotary = Rotary(ROTARY_DIM, self.head_dim)
        self.drop = nn.Dropout(dropout)

    def attend(self, x, mask, past):
        b, t, _ = x.shape
        qkv = self.to_qkv(x).view(b, t, self.heads, 3, self.head_dim)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        start = 0 if past is None else past[0].shape[2]
        positions = torch.arange(start, start + t, device=x.device)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        sim = einsum("bhik,bhjk->bhij", q, k) * self.head_dim**-0.5
        sim = sim.masked_fill(~mask, torch.finfo(sim.dtype).min)
        attn = sim.softmax(dim=-1).masked_fill(~mask, 0.0).to(v.dtype)
        out = einsum("bhij,bhjk->bhik", self.drop(attn), v)
        return self.to_out(out.transpose(1, 2).reshape(b, t, -1)), (k, v)

    def forward(self, x, mask, past=None):
        attended, past = self.attend(self.ln_attn(x), mask, past)
        fed = self.down(gelu(self.up(self.ln_mlp(x))))
        return x + self.drop(attended) + self.drop(fed), past


class GPTNeoX(nn.Module):
    def __init__(self, vocab, dim, depth, heads, hidden, dropout=0.0):
        super().__init__()
        self.embed_in = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList([NeoXBlock(dim, heads, hidden, dropout) for _ in range(depth)])
        self.ln_final = nn.LayerNorm(dim)
        self.embed_out = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens, mask=None, past=None, return_past=False):
        x = self.embed_in(tokens)
        t = x.shape[1]
        start = 0 if past is None else past[0][0].shape[2]
        allowed = torch.ones(t, start + t, dtype=torch.bool, device=x.device).tril(start)[None, None]
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        present = []
        for i, block in enumerate(self.blocks):
            x, kv = block(x, allowed, None if past is None else past[i])
            present.append(kv)
        logits = self.embed_out(self.ln_final(x))
        return (logits, present) if return_past else logits

    def loss(self, tokens, labels):
        logits = self(tokens)[:, :-1]
        return cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def cached(model, chunks, attention_mask=None, reorder=None):
    past, seen, outputs = None, 0, []
    for chunk in chunks:
        seen += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :seen]
        logits, past = model(chunk, mask, past, return_past=True)
        if reorder is not None and not outputs:
            past = [(k[reorder], v[reorder]) for k, v in past]
            attention_mask = None if attention_mask is None else attention_mask[reorder]
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="GPT-NeoX",
    build=lambda c: GPTNeoX(c.vocab_size, c.d_model, c.num_layers, c.num_heads, c.d_ff, c.dropout),
    domain={"d_model": (16, 32), "num_heads": (1, 2)},
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask),
    cache=cached,
    loss=lambda model, tokens, labels: model.loss(tokens, labels),
    declares={
        "causal": True,
        "positions": "rotary",
        "layout": "halves",
        "base": 10000,
        "rotary_dim": ROTARY_DIM,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "residual": True,
        "activation": "gelu",
        "bias": True,
        "output_bias": False,
        "attention_scale": "1/sqrt(d_head)",
        "tied": False,
        "embedding_scale": False,
        "init": "default",
        "structure": "other",
        "padding_side": "both",
        "beyond_max_len": "works",
        "shifts_labels": True,
        "empty_loss": "nan",
        "memory": "quadratic",
    },
)
