WHAT = "cached decoding takes the positions of a chunk from the length of the cache instead of from the mask's cumulative sum, so left padded samples get shifted positions there (line 71, `step`)"
import torch
from torch import nn

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in range(3))
        self.to_out = nn.Linear(dim, dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, allowed, layer_past=None):
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(x)), self.split(self.to_v(x))
        if layer_past is not None:
            k = torch.cat((layer_past[0], k), dim=2)
            v = torch.cat((layer_past[1], v), dim=2)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~allowed[:, None], float("-inf"))
        y = scores.softmax(-1) @ v
        return self.to_out(y.transpose(1, 2).flatten(2)), (k, v)


class Layer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, allowed, layer_past=None):
        y, present = self.attn(self.norm1(x), allowed, layer_past)
        x = x + y
        return x + self.down(torch.relu(self.up(self.norm2(x)))), present


class CausalLM(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.layers = nn.ModuleList(Layer(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size)

    @staticmethod
    def position_ids(mask):
        return (mask.long().cumsum(1) - 1).clamp(min=0)

    @staticmethod
    def visible(mask):
        T = mask.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        return (causal & mask[:, None, :]) | torch.eye(T, dtype=torch.bool)

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask
        return self.step(tokens, mask, None)[0]

    def step(self, tokens, mask, pasts):
        """`mask` is of all tokens so far, the new ones among them."""
        if pasts is None:
            past = 0
            position = self.position_ids(mask)
        else:
            past = pasts[0][0].shape[2]
            position = torch.arange(past, past + tokens.shape[1])
        x = self.tok(tokens) + self.pos(position)
        allowed, presents = self.visible(mask)[:, past:], []
        for i, layer in enumerate(self.layers):
            x, present = layer(x, allowed, None if pasts is None else pasts[i])
            presents.append(present)
        return self.head(self.norm(x)), presents


def cache(model, chunks, attention_mask=None):
    pasts, seen, outputs = None, 0, []
    total = sum(chunk.shape[1] for chunk in chunks)
    if attention_mask is None:
        attention_mask = torch.ones(chunks[0].shape[0], total, dtype=torch.bool)
    for chunk in chunks:
        seen += chunk.shape[1]
        logits, pasts = model.step(chunk, attention_mask[:, :seen], pasts)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    build=CausalLM,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    cache=cache,
    declares={"positions": "learned", "padding_side": "both", "norm_placement": "pre", "norm": "layer", "activation": "relu"},
)
