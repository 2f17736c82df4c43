"""Port of a fairseq-style encoder: inside, everything is time-major [T, B, D]."""
import torch
from torch import nn

from veriformer.properties import Subject


class TimeMajorAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x, keep):
        t, b, d = x.shape
        shape = (t, b, self.num_heads, self.head_dim)
        q = self.q_proj(x).view(shape) * self.head_dim**-0.5
        k, v = self.k_proj(x).view(shape), self.v_proj(x).view(shape)
        logits = torch.einsum("tbhc,sbhc->tsbh", q, k)
        if keep is not None:  # [S, B]
            logits = logits.masked_fill(~keep[None, :, :, None], torch.finfo(logits.dtype).min)
        return self.out_proj(torch.einsum("tsbh,sbhc->tbhc", logits.softmax(dim=1), v).reshape(t, b, d))


class TimeMajorLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.self_attn = TimeMajorAttention(cfg.d_model, cfg.num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(cfg.d_model)
        self.fc1, self.fc2 = nn.Linear(cfg.d_model, cfg.d_ff), nn.Linear(cfg.d_ff, cfg.d_model)
        self.final_layer_norm = nn.LayerNorm(cfg.d_model)

    def forward(self, x, keep):
        x = self.self_attn_layer_norm(x + self.self_attn(x, keep))
        return self.final_layer_norm(x + self.fc2(torch.relu(self.fc1(x))))


class TimeMajorEncoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.d_model)
        self.embed_positions = nn.Embedding(cfg.max_len, cfg.d_model)
        self.layers = nn.ModuleList(TimeMajorLayer(cfg) for _ in range(cfg.num_layers))

    def forward(self, tokens, mask=None):
        b, t = tokens.shape
        x = self.embed_tokens(tokens.t()) + self.embed_positions.weight[:t, None]
        keep = None if mask is None else mask.reshape(t, b)
        for layer in self.layers:
            x = layer(x, keep)
        return x.transpose(0, 1)


subject = Subject(
    kind="encoder",
    name="time-major",
    build=TimeMajorEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={"causal": False, "padding_side": "right"},
)

WHAT = 'Line 50: the mask [B, T] is reshaped to [T, B], not transposed: its entries fall on other tokens and other samples (with one sample nothing is wrong).'
