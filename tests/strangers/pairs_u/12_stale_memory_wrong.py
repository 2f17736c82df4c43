WHAT = "the cached keys and values of the cross-attention are kept whenever their shape fits, so that a second source of the same length is decoded with the memory of the first (line 32)"
# A Whisper-like encoder-decoder: pre-LN, fixed waves in the encoder, a learned table in the decoder, cached decoding.
import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from veriformer.properties import Subject


class Attention(nn.Module):
    def __init__(self, state, heads):
        super().__init__()
        self.heads = heads
        self.query, self.out = nn.Linear(state, state), nn.Linear(state, state)
        self.key, self.value = nn.Linear(state, state, bias=False), nn.Linear(state, state)
        self.store = None

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def keys_values(self, source):
        return self.split(self.key(source)), self.split(self.value(source))

    def fits(self, source):
        k = None if self.store is None else self.store[0]
        return k is not None and k.dtype == source.dtype and (k.size(0), k.size(2)) == source.shape[:2]

    def forward(self, x, memory=None, mask=None, offset=None):
        if offset is None:
            k, v = self.keys_values(x if memory is None else memory)
        elif memory is not None:
            if not self.fits(memory):
                self.store = self.keys_values(memory)
            k, v = self.store
        else:
            k, v = self.keys_values(x)
            if offset > 0:
                k, v = torch.cat([self.store[0], k], 2), torch.cat([self.store[1], v], 2)
            self.store = k, v
        y = scaled_dot_product_attention(self.split(self.query(x)), k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, state, heads, hidden, cross):
        super().__init__()
        self.attn, self.attn_ln = Attention(state, heads), nn.LayerNorm(state)
        self.cross, self.cross_ln = (Attention(state, heads), nn.LayerNorm(state)) if cross else (None, None)
        self.mlp_ln, self.up, self.down = nn.LayerNorm(state), nn.Linear(state, hidden), nn.Linear(hidden, state)

    def forward(self, x, memory=None, mask=None, memory_mask=None, offset=None):
        x = x + self.attn(self.attn_ln(x), mask=mask, offset=offset)
        if self.cross is not None:
            x = x + self.cross(self.cross_ln(x), memory, memory_mask, offset)
        return x + self.down(gelu(self.up(self.mlp_ln(x))))


class Whisperer(nn.Module):
    def __init__(self, c):
        super().__init__()
        D, speeds = c.d_model, torch.arange((c.d_model + 1) // 2, dtype=torch.float64)
        angle = torch.arange(c.max_len, dtype=torch.float64)[:, None] * 10000 ** (-2 * speeds / D)
        self.register_buffer("waves", torch.cat([angle.sin(), angle.cos()], 1)[:, :D])
        self.token_embedding = nn.Embedding(c.vocab_size, D)
        self.positions = nn.Parameter(torch.randn(c.max_len, D) * 0.5)
        self.encoder = nn.ModuleList(Block(D, c.num_heads, c.d_ff, False) for _ in range(c.num_layers))
        self.decoder = nn.ModuleList(Block(D, c.num_heads, c.d_ff, True) for _ in range(c.num_layers))
        self.ln_post, self.ln = nn.LayerNorm(D), nn.LayerNorm(D)

    def encode(self, source, source_mask=None):
        x = self.token_embedding(source)
        x = x + self.waves[: x.size(1)].to(x.dtype)
        mask = None if source_mask is None else source_mask[:, None, None]
        for block in self.encoder:
            x = block(x, mask=mask)
        return self.ln_post(x)

    def forward(self, target, memory, source_mask=None, target_mask=None, offset=None):
        start, length = offset or 0, target.size(1)
        x = self.token_embedding(target) + self.positions[start : start + length]
        step = torch.arange(start + length, device=target.device)
        mask = (step <= step[start:, None])[None, None]
        if target_mask is not None:
            mask = mask & target_mask[:, None, None] | torch.eye(length, dtype=torch.bool, device=target.device)
        memory_mask = None if source_mask is None else source_mask[:, None, None]
        for block in self.decoder:
            x = block(x, memory, mask, memory_mask, offset)
        return self.ln(x) @ self.token_embedding.weight.T


@torch.no_grad()
def decode(model, source, chunks):
    memory, offset, outputs = model.encode(source), 0, []
    for chunk in chunks:
        outputs.append(model(chunk, memory, offset=offset))
        offset += chunk.size(1)
    return torch.cat(outputs, 1)


subject = Subject(
    kind="encoder_decoder",
    build=Whisperer,
    forward=lambda model, source, target, source_mask=None, target_mask=None: model(
        target, model.encode(source, source_mask), source_mask, target_mask
    ),
    cache=decode,
    declares={"norm_placement": "pre", "tied": True},
)
