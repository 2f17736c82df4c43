"""Hugging Face manners: a config, a past, position ids from the attention mask, grouped key-value heads."""

from dataclasses import dataclass

import torch
from torch import nn

from veriformer.properties import Subject

WHAT = "Cached steps number the new tokens from the longest row of the batch, not from each row's own count of real tokens."
CAUSE = (
    "With a cache and left padding of unequal amounts, positions of the chunk start at one number for the whole batch "
    "(the maximum over rows of the real tokens seen); shorter rows jump ahead in the position table. Alone, or unpadded, a row is right."
)


@dataclass
class TinyConfig:
    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    intermediate_size: int
    max_position_embeddings: int
    batch_wide_offset: bool = False


class Past:
    def __init__(self):
        self.layers, self.mask, self.seen = {}, None, None

    def extend(self, i, k, v):
        if i in self.layers:
            k, v = (torch.cat([old, new], 1) for old, new in zip(self.layers[i], (k, v)))
        self.layers[i] = (k, v)
        return k, v

    def reorder(self, beams):
        self.layers = {i: (k[beams], v[beams]) for i, (k, v) in self.layers.items()}
        self.mask, self.seen = self.mask[beams], self.seen[beams]


class TinyLayer(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        d = cfg.hidden_size // cfg.num_attention_heads
        self.shape = (cfg.num_key_value_heads, cfg.num_attention_heads // cfg.num_key_value_heads, d)
        self.q_proj, self.o_proj = nn.Linear(cfg.hidden_size, cfg.hidden_size), nn.Linear(cfg.hidden_size, cfg.hidden_size)
        self.k_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * d)
        self.v_proj = nn.Linear(cfg.hidden_size, cfg.num_key_value_heads * d)
        self.input_norm, self.post_norm = nn.LayerNorm(cfg.hidden_size), nn.LayerNorm(cfg.hidden_size)
        self.up, self.down = nn.Linear(cfg.hidden_size, cfg.intermediate_size), nn.Linear(cfg.intermediate_size, cfg.hidden_size)

    def forward(self, h, visible, past, i):
        B, T, _ = h.shape
        G, R, d = self.shape
        x = self.input_norm(h)
        q = self.q_proj(x).view(B, T, G, R, d)
        k, v = past.extend(i, self.k_proj(x).view(B, T, G, d), self.v_proj(x).view(B, T, G, d))
        scores = torch.einsum("btgrd,bsgd->bgrts", q, k) / d**0.5
        scores = scores.masked_fill(~visible[:, None, None], torch.finfo(scores.dtype).min)
        h = h + self.o_proj(torch.einsum("bgrts,bsgd->btgrd", scores.softmax(-1), v).reshape(B, T, -1))
        return h + self.down(torch.relu(self.up(self.post_norm(h))))


class TinyForCausalLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.embed_positions = nn.Embedding(cfg.max_position_embeddings, cfg.hidden_size)
        self.layers = nn.ModuleList([TinyLayer(cfg) for _ in range(cfg.num_hidden_layers)])
        self.norm, self.lm_head = nn.LayerNorm(cfg.hidden_size), nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)

    def forward(self, input_ids, attention_mask=None, past=None):
        past = Past() if past is None else past
        mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        start = mask.new_zeros(len(mask), dtype=torch.long) if past.seen is None else past.seen
        offset = start.max() if self.cfg.batch_wide_offset else start[:, None]
        position_ids = (offset + mask.long().cumsum(1) - 1).clamp(min=0)
        past.seen, past.mask = start + mask.sum(1), mask if past.mask is None else torch.cat([past.mask, mask], 1)
        visible = past.mask[:, None].expand(-1, mask.shape[1], -1).tril(past.mask.shape[1] - mask.shape[1])
        h = self.embed_tokens(input_ids) + self.embed_positions(position_ids)
        for i, layer in enumerate(self.layers):
            h = layer(h, visible, past, i)
        return self.lm_head(self.norm(h))


def cached(model, chunks, attention_mask=None, reorder=None):
    sizes = [chunk.shape[1] for chunk in chunks]
    masks = [None] * len(chunks) if attention_mask is None else attention_mask.split(sizes, 1)
    past, outputs = Past(), []
    for n, (chunk, mask) in enumerate(zip(chunks, masks)):
        outputs.append(model(chunk, mask, past))
        if n == 0 and reorder is not None:
            past.reorder(reorder)
    return torch.cat(outputs, 1)


def subject(flag):
    sizes = lambda c: (c.vocab_size, c.d_model, c.num_heads, c.num_key_value_heads, c.num_layers, c.d_ff, c.max_len)
    return Subject(
        kind="decoder", name="TinyForCausalLM", build=lambda c: TinyForCausalLM(TinyConfig(*sizes(c), flag)),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask), cache=cached,
        declares={"positions": "learned", "padding_side": "both", "norm_placement": "pre", "activation": "relu"},
    )  # fmt: skip


right, wrong = subject(False), subject(True)
