"""GPT with learned positions that supports left padding: position ids are counted from the mask."""

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject


def position_ids(attention_mask, past, length):
    """The number of real tokens before each of the `length` new ones."""
    counted = attention_mask.long().cumsum(dim=1) - 1
    return counted.clamp(min=0)[:, past : past + length]


class Block(nn.Module):
    def __init__(self, d_model, heads, d_ff):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.up, self.down = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x, allowed, past):
        batch, length, width = x.shape
        heads = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)))), (k, v)


class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(c.vocab_size, c.d_model), nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm, self.head = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens, attention_mask=None, past=None):
        """`attention_mask` [B, past + T] of all tokens so far; `past` a list of (keys, values)."""
        batch, length = tokens.shape
        before = 0 if past is None else past[0][0].shape[2]
        total = before + length
        if attention_mask is None:
            attention_mask = torch.ones(batch, total, dtype=torch.bool, device=tokens.device)
        places = position_ids(attention_mask, before, length)
        rows = torch.arange(before, total, device=tokens.device)[:, None]
        columns = torch.arange(total, device=tokens.device)[None]
        allowed = (columns <= rows) & attention_mask[:, None, None] | (columns == rows)
        x = self.tokens(tokens) + self.positions(places)
        present = []
        for number, block in enumerate(self.blocks):
            x, pair = block(x, allowed, None if past is None else past[number])
            present.append(pair)
        return self.head(self.norm(x)), present


def cached(model, chunks, attention_mask=None, reorder=None):
    outputs, past, seen = [], None, 0
    for number, chunk in enumerate(chunks):
        if number == 1 and reorder is not None:
            beams = torch.as_tensor(reorder, device=chunk.device)
            past = [(k[beams], v[beams]) for k, v in past]
            attention_mask = None if attention_mask is None else attention_mask[beams]
        seen += chunk.shape[1]
        mask = None if attention_mask is None else attention_mask[:, :seen]
        logits, past = model(chunk, mask, past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


@torch.no_grad()
def generate(model, tokens, steps, use_cache):
    past, fresh = None, tokens
    for _ in range(steps):
        logits, present = model(fresh if use_cache else tokens, None, past)
        past = present if use_cache else None
        fresh = logits[:, -1:].argmax(dim=-1)
        tokens = torch.cat([tokens, fresh], dim=1)
    return tokens


subject = Subject(
    kind="decoder",
    name="GPT with positions of the mask",
    build=GPT,
    forward=lambda model, tokens, attention_mask=None: model(tokens, attention_mask)[0],
    cache=cached,
    generate=generate,
    declares={"positions": "learned", "norm": "layer", "norm_placement": "pre", "padding_side": "both"},
)
if __name__ == "__main__":
    print(subject.build(DrawnConfig())(torch.zeros(1, 4, dtype=torch.long))[0].shape)
