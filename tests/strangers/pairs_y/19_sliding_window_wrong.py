WHAT = "The mask of the prefill lets a query see window + 1 keys (distance <= window), while steps behind the cache see window (line 22)."
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig, Subject

WINDOW = 4


def turn(x, positions):
    """Rotary positions of complex pairs (2i, 2i + 1)."""
    width = x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=x.device) / width)
    angles = positions.double()[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    re, im = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((re * cos - im * sin, re * sin + im * cos), -1).flatten(-2)


def prefill_mask(T, device):
    distance = torch.arange(T, device=device)[:, None] - torch.arange(T, device=device)[None, :]
    return (distance >= 0) & (distance <= WINDOW)


def step_mask(queries, keys):
    distance = queries[:, None] - keys[None, :]
    return (distance >= 0) & (distance < WINDOW)


class MistralBlock(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads, hidden_dim):
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = n_heads, n_kv_heads, dim // n_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x, positions, buffer=None):
        B, T, _ = x.shape
        h = self.attention_norm(x)
        q = turn(self.wq(h).view(B, T, self.n_heads, -1).transpose(1, 2), positions)
        k = turn(self.wk(h).view(B, T, self.n_kv_heads, -1).transpose(1, 2), positions)
        v = self.wv(h).view(B, T, self.n_kv_heads, -1).transpose(1, 2)
        if not buffer:
            mask = prefill_mask(T, x.device)
            kept = positions
        else:
            k, v = torch.cat((buffer["k"], k), 2), torch.cat((buffer["v"], v), 2)
            kept = torch.cat((buffer["positions"], positions))
            mask = step_mask(positions, kept)
        if buffer is not None:  # a rolling buffer: what no later query sees is forgotten
            buffer.update(k=k[:, :, -WINDOW:], v=v[:, :, -WINDOW:], positions=kept[-WINDOW:])
        repeats = self.n_heads // self.n_kv_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.wo(y.transpose(1, 2).reshape(B, T, -1))
        h = self.ffn_norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Mistral(nn.Module):
    def __init__(self, c):
        super().__init__()
        if c.d_head % 2:
            raise ValueError("rotary positions pair channels")
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(
            MistralBlock(c.d_model, c.num_heads, c.num_key_value_heads, c.d_ff) for _ in range(c.num_layers)
        )
        self.norm = nn.RMSNorm(c.d_model, eps=1e-5)
        self.output = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, start=0, buffers=None):
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x = self.tok_embeddings(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, None if buffers is None else buffers[i])
        return self.output(self.norm(x))


def rolling(model, chunks):
    buffers, outputs, start = [{} for _ in model.layers], [], 0
    for chunk in chunks:
        outputs.append(model(chunk, start, buffers))
        start += chunk.shape[1]
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="Mistral",
    build=Mistral,
    forward=lambda model, tokens: model(tokens),
    cache=rolling,
    declares={
        "positions": "rotary",
        "layout": "interleaved",
        "window": WINDOW,
        "grouped_queries": True,
        "norm": "rms",
        "norm_placement": "pre",
        "activation": "swiglu",
    },
)
