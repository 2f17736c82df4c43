WHAT = "_reorder_cache reorders the keys and leaves the values of the cache in the old order of the beams (line 68)"
"""Phi-2 with legacy past_key_values: a tuple of (key, value) a layer, as older versions of the library had it."""
import torch
from torch import nn

from veriformer.properties import Subject

ROTARY = 4


def rotate(x, positions):
    turned, rest = x[..., :ROTARY], x[..., ROTARY:]
    inv = 1.0 / 10000.0 ** (torch.arange(0, ROTARY, 2, dtype=torch.float64, device=x.device) / ROTARY)
    angles = torch.outer(positions.double(), inv)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = turned.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class PhiLayer(nn.Module):
    def __init__(self, dim, heads, inner):
        super().__init__()
        self.heads = heads
        self.input_layernorm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.dense = nn.Linear(dim, dim)
        self.fc1, self.fc2 = nn.Linear(dim, inner), nn.Linear(inner, dim)

    def forward(self, hidden, past=None):
        residual = hidden
        hidden = self.input_layernorm(hidden)
        B, T, D = hidden.shape
        q, k, v = self.qkv(hidden).view(B, T, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        start = 0 if past is None else past[0].shape[-2]
        positions = torch.arange(start, start + T, device=hidden.device)
        q, k = rotate(q, positions), rotate(k, positions)
        if past is not None:
            k = torch.cat([past[0], k], dim=-2)
            v = torch.cat([past[1], v], dim=-2)
        scores = q @ k.mT * (D // self.heads) ** -0.5
        hidden_keys = torch.arange(k.shape[-2], device=hidden.device)[None, :] > positions[:, None]
        scores = scores.masked_fill(hidden_keys, float("-inf"))
        attended = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)
        feed_forward = self.fc2(nn.functional.gelu(self.fc1(hidden), approximate="tanh"))
        return self.dense(attended) + feed_forward + residual, (k, v)


class PhiForCausalLM(nn.Module):
    def __init__(self, vocab, dim, heads, layers, inner):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([PhiLayer(dim, heads, inner) for _ in range(layers)])
        self.final_layernorm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=True)

    def forward(self, input_ids, past_key_values=None):
        hidden = self.embed_tokens(input_ids)
        presents = ()
        for index, layer in enumerate(self.layers):
            hidden, present = layer(hidden, None if past_key_values is None else past_key_values[index])
            presents += (present,)
        return self.lm_head(self.final_layernorm(hidden)), presents

    @staticmethod
    def _reorder_cache(past_key_values, beam_idx):
        reordered = ()
        for key, value in past_key_values:
            reordered += ((key.index_select(0, beam_idx), value),)
        return reordered


def decode(model, chunks, reorder=None):
    past, outputs = None, []
    for step, chunk in enumerate(chunks):
        logits, past = model(chunk, past)
        outputs.append(logits)
        if step == 0 and reorder is not None:
            past = model._reorder_cache(past, torch.as_tensor(reorder))
    return torch.cat(outputs, dim=1)


subject = Subject(
    kind="decoder",
    name="Phi-2",
    build=lambda c: PhiForCausalLM(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens: m(tokens)[0],
    cache=decode,
    domain={"d_model": (16, 32), "num_heads": (2, 4)},
    declares={
        "positions": "rotary",
        "layout": "halves",
        "rotary_dim": ROTARY,
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu_tanh",
        "bias": True,
        "output_bias": True,
        "structure": "other",
    },
)
