WHAT = 'in evaluation the cross-attention keeps the keys and values of the first source and takes them again for any other of the same shape (the cache is keyed by memory.shape and never reset)'
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.v_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.static_kv = None

    def split(self, t):
        return t.view(t.size(0), t.size(1), self.heads, -1).transpose(1, 2)

    def project(self, source):
        return self.split(self.k_proj(source)), self.split(self.v_proj(source))

    def forward(self, x, source=None, allowed=None):
        if source is None:
            k, v = self.project(x)
        elif self.training:
            k, v = self.project(source)
        else:
            if self.static_kv is None or self.static_kv[0] != source.shape:
                self.static_kv = (source.shape, *self.project(source))
            _, k, v = self.static_kv
        y = F.scaled_dot_product_attention(self.split(self.q_proj(x)), k, v, attn_mask=allowed)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden, crosses):
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.cross = Attention(dim, heads) if crosses else None
        self.norm2 = nn.LayerNorm(dim) if crosses else None
        self.fc1, self.fc2, self.norm3 = nn.Linear(dim, hidden), nn.Linear(hidden, dim), nn.LayerNorm(dim)

    def forward(self, x, allowed, memory=None, memory_allowed=None):
        x = self.norm1(x + self.self_attn(x, allowed=allowed))
        if self.cross is not None:
            x = self.norm2(x + self.cross(x, memory, memory_allowed))
        return self.norm3(x + self.fc2(self.fc1(x).relu()))


class SpeechToText(nn.Module):
    def __init__(self, vocab, dim, heads, depth, hidden, max_len):
        super().__init__()
        self.units, self.words = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.source_pos, self.target_pos = nn.Embedding(max_len, dim), nn.Embedding(max_len, dim)
        self.encoder = nn.ModuleList(Layer(dim, heads, hidden, False) for _ in range(depth))
        self.decoder = nn.ModuleList(Layer(dim, heads, hidden, True) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, source, target, source_mask=None, target_mask=None):
        S, T = source.size(1), target.size(1)
        over = None if source_mask is None else source_mask[:, None, None, :]
        memory = self.units(source) + self.source_pos.weight[:S]
        for layer in self.encoder:
            memory = layer(memory, over)
        allowed = torch.ones(T, T, dtype=torch.bool, device=target.device).tril()[None, None]
        if target_mask is not None:
            allowed = allowed & target_mask[:, None, None, :]
            allowed = allowed | torch.eye(T, dtype=torch.bool, device=target.device)
        x = self.words(target) + self.target_pos.weight[:T]
        for layer in self.decoder:
            x = layer(x, allowed, memory, over)
        return self.head(x)


subject = Subject(
    kind="encoder_decoder",
    name="speech units to text",
    build=lambda c: SpeechToText(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "post", "final_norm": False,
              "activation": "relu", "bias": True, "padding_side": "right"},
)
