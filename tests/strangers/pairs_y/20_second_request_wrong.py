WHAT = "Without gradients the encoder's output is kept and taken again for any source of the same shape, so that the second request is answered from the first one's source (line 67)."
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig, Subject


class MultiHead(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(d, d), nn.Linear(d, d)
        self.v_proj, self.out_proj = nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, context, allowed):
        q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.k_proj(context).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.v_proj(context).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Post-norm, as in BART; of a decoder with cross-attention."""

    def __init__(self, d, heads, ff, cross):
        super().__init__()
        self.self_attn, self.self_norm = MultiHead(d, heads), nn.LayerNorm(d)
        if cross:
            self.cross_attn, self.cross_norm = MultiHead(d, heads), nn.LayerNorm(d)
        self.fc1, self.fc2, self.ff_norm = nn.Linear(d, ff), nn.Linear(ff, d), nn.LayerNorm(d)

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        x = self.self_norm(x + self.self_attn(x, x, allowed))
        if memory is not None:
            x = self.cross_norm(x + self.cross_attn(x, memory, memory_allowed))
        return self.ff_norm(x + self.fc2(F.gelu(self.fc1(x))))


class Bart(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.shared = nn.Embedding(c.vocab_size, c.d_model)
        self.source_positions = nn.Embedding(c.max_len, c.d_model)
        self.target_positions = nn.Embedding(c.max_len, c.d_model)
        sizes = (c.d_model, c.num_heads, c.d_ff)
        self.encoder = nn.ModuleList(Layer(*sizes, cross=False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Layer(*sizes, cross=True) for _ in range(c.num_layers))
        self.lm_head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.kept = None

    @staticmethod
    def keys(tokens, mask):
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.bool()
        return mask[:, None, None, :]

    def encode(self, source, allowed):
        x = self.shared(source) + self.source_positions.weight[: source.shape[1]]
        for layer in self.encoder:
            x = layer(x, allowed)
        return x

    def memory(self, source, allowed):
        if torch.is_grad_enabled():
            return self.encode(source, allowed)
        if self.kept is None or self.kept.shape[:2] != source.shape or self.kept.dtype != self.lm_head.weight.dtype:
            self.kept = self.encode(source, allowed)
        return self.kept

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_allowed = self.keys(source, source_mask)
        memory = self.memory(source, source_allowed)
        T = target.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()
        allowed = causal & self.keys(target, target_mask)
        x = self.shared(target) + self.target_positions.weight[:T]
        for layer in self.decoder:
            x = layer(x, allowed, memory, source_allowed)
        return self.lm_head(x)


subject = Subject(
    kind="encoder_decoder",
    name="BART",
    build=Bart,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        source, target, source_mask, target_mask
    ),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
        "padding_side": "right",
    },
)
