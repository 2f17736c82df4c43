"""An OPT-like decoder: learned positions counted over real tokens (padding left or right), and a key-value cache."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "Behind a cached prefix, positions go on from the length of the cache instead of from the number of real tokens in it."
CAUSE = (
    "The first chunk counts positions over the attention mask, later chunks take past_length + arange: with padding on "
    "the left, every cached step looks up a position that is too late by the amount of padding; without padding, "
    "and without the cache, all is right."
)


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x, keep, past):
        b, n, d = x.shape
        q, k, v = self.qkv(self.attn_norm(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(-1, -2) / (d // self.heads) ** 0.5
        weights = scores.masked_fill(~keep, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(~keep, 0.0)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, n, d))
        return x + self.fc2(F.relu(self.fc1(self.ffn_norm(x)))), (k, v)


class Decoder(nn.Module):
    def __init__(self, vocab, dim, heads, layers, hidden, max_len):
        super().__init__()
        self.embed_tokens, self.embed_positions = nn.Embedding(vocab, dim), nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([DecoderLayer(dim, heads, hidden) for _ in range(layers)])
        self.final_norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def position_ids(self, mask, past_length):
        """mask [B, past + new] -> [B, new]: how many real tokens stand before each of the new ones."""
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, past_length:]

    def forward(self, tokens, attention_mask=None, past=None):
        past_length = 0 if past is None else past[0][0].shape[2]
        total = past_length + tokens.shape[1]
        if attention_mask is None:
            attention_mask = torch.ones(tokens.shape[0], total, dtype=torch.bool, device=tokens.device)
        x = self.embed_tokens(tokens) + self.embed_positions(self.position_ids(attention_mask, past_length))
        causal = torch.ones(total, total, dtype=torch.bool, device=tokens.device).tril()[past_length:]
        keep = causal & attention_mask[:, None, None, :]
        kept = []
        for i, layer in enumerate(self.layers):
            x, new = layer(x, keep, None if past is None else past[i])
            kept.append(new)
        return self.lm_head(self.final_norm(x)), kept


class DecoderByLength(Decoder):
    def position_ids(self, mask, past_length):
        """mask [B, past + new] -> [B, new]: how many real tokens stand before each of the new ones."""
        if past_length:
            return torch.arange(past_length, mask.shape[1], device=mask.device).expand(mask.shape[0], -1)
        return (mask.long().cumsum(1) - 1).clamp(min=0)


def cache(model, chunks, attention_mask=None):
    past, done, outputs = None, 0, []
    for chunk in chunks:
        done += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :done]
        logits, past = model(chunk, mask, past)
        outputs.append(logits)
    return torch.cat(outputs, 1)


def subject(cls):
    return Subject(
        kind="decoder",
        name=cls.__name__,
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask)[0],
        cache=cache,
        mask_forms=("padding",),
        declares={"positions": "learned", "padding_side": "both", "norm_placement": "pre", "activation": "relu"},
    )


right = subject(Decoder)
wrong = subject(DecoderByLength)
