# A decoder with learned positions that are counted over real tokens (left padding allowed), and a key-value cache.
import torch
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.q_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def shape(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def forward(self, x, allowed, past=None):
        q, k, v = self.shape(self.q_proj(x)), self.shape(self.k_proj(x)), self.shape(self.v_proj(x))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        scores = (q * self.scale) @ k.transpose(2, 3)
        weights = scores.masked_fill(~allowed[:, None], float("-inf")).softmax(-1)
        y = (weights @ v).transpose(1, 2).reshape(x.shape)
        return self.out_proj(y), (k, v)


class DecoderLayer(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.self_attn = Attention(width, heads)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x, allowed, past):
        y, present = self.self_attn(self.self_attn_layer_norm(x), allowed, past)
        x = x + y
        return x + self.fc2(torch.relu(self.fc1(self.final_layer_norm(x)))), present


class OPT(nn.Module):
    def __init__(self, vocab, width, heads, hidden, depth, longest):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, width)
        self.embed_positions = nn.Embedding(longest, width)
        self.layers = nn.ModuleList([DecoderLayer(width, heads, hidden) for _ in range(depth)])
        self.final_layer_norm = nn.LayerNorm(width)

    def forward(self, tokens, mask=None, past=None):
        """mask [B, all tokens so far], True = a real token."""
        seen = 0 if past is None else past[0][0].size(2)
        total = seen + tokens.size(1)
        if mask is None:
            mask = torch.ones(tokens.size(0), total, dtype=torch.bool, device=tokens.device)
        places = torch.arange(total, device=tokens.device)
        if past is None:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)
        else:
            positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, seen:]
        x = self.embed_tokens(tokens) + self.embed_positions(positions)
        rows = places[seen:, None]
        allowed = ((places <= rows) & mask[:, None, :]) | (places == rows)
        present = []
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, allowed, None if past is None else past[i])
            present.append(kv)
        logits = self.final_layer_norm(x) @ self.embed_tokens.weight.t()
        return logits, present


def decode(model, chunks, attention_mask=None):
    outputs, past, end = [], None, 0
    for chunk in chunks:
        end += chunk.size(1)
        mask = None if attention_mask is None else attention_mask[:, :end]
        logits, past = model(chunk, mask, past)
        outputs.append(logits)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="decoder",
    name="OPT",
    build=lambda c: OPT(c.vocab_size, c.d_model, c.num_heads, c.d_ff, c.num_layers, c.max_len),
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=decode,
    declares={
        "causal": True,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "activation": "relu",
        "tied": True,
        "padding_side": "both",
    },
)
