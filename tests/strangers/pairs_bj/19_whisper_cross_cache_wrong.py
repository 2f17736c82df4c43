WHAT = "reset() of a decoder block clears the self-attention cache and not cross_kv (line 57 and missing after it), so that a second source of the same batch size and length is decoded with the keys and values of the first."
"""Whisper-like encoder-decoder on tokens; the decoder keeps keys and values of both attentions between steps."""

import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

START = 0


class Attention(nn.Module):
    def __init__(self, n_state, n_head):
        super().__init__()
        self.n_head = n_head
        self.query = nn.Linear(n_state, n_state)
        self.key = nn.Linear(n_state, n_state, bias=False)
        self.value = nn.Linear(n_state, n_state)
        self.out = nn.Linear(n_state, n_state)

    def heads(self, t):
        return t.view(*t.shape[:2], self.n_head, -1).transpose(1, 2)

    def keys_values(self, x):
        return self.heads(self.key(x)), self.heads(self.value(x))

    def attend(self, x, k, v, mask=None):
        y = F.scaled_dot_product_attention(self.heads(self.query(x)), k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c.d_model, c.num_heads)
        self.attn_ln, self.mlp_ln = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))

    def forward(self, x, mask):
        h = self.attn_ln(x)
        x = x + self.attn.attend(h, *self.attn.keys_values(h), mask)
        return x + self.mlp(self.mlp_ln(x))


class DecoderBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attn = Attention(c.d_model, c.num_heads)
        self.cross_attn = Attention(c.d_model, c.num_heads)
        self.attn_ln, self.cross_attn_ln = nn.LayerNorm(c.d_model), nn.LayerNorm(c.d_model)
        self.mlp_ln = nn.LayerNorm(c.d_model)
        self.mlp = nn.Sequential(nn.Linear(c.d_model, c.d_ff), nn.GELU(), nn.Linear(c.d_ff, c.d_model))
        self.self_kv = None
        self.cross_kv = None

    def reset(self):
        self.self_kv = None

    def forward(self, x, memory, memory_mask, mask, use_cache):
        h = self.attn_ln(x)
        k, v = self.attn.keys_values(h)
        if use_cache:
            if self.self_kv is not None:
                k = torch.cat((self.self_kv[0], k), 2)
                v = torch.cat((self.self_kv[1], v), 2)
            self.self_kv = (k, v)
        x = x + self.attn.attend(h, k, v, mask)
        if use_cache:
            expected = (memory.shape[0], memory.shape[1])
            if self.cross_kv is None or (self.cross_kv[0].shape[0], self.cross_kv[0].shape[2]) != expected:
                self.cross_kv = self.cross_attn.keys_values(memory)
            cross = self.cross_kv
        else:
            cross = self.cross_attn.keys_values(memory)
        x = x + self.cross_attn.attend(self.cross_attn_ln(x), *cross, memory_mask)
        return x + self.mlp(self.mlp_ln(x))


class Whisperish(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.source_embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.source_positions = nn.Embedding(c.max_len, c.d_model)
        self.token_embedding = nn.Embedding(c.vocab_size, c.d_model)
        self.positional_embedding = nn.Embedding(c.max_len, c.d_model)
        self.encoder_blocks = nn.ModuleList(EncoderBlock(c) for _ in range(c.num_layers))
        self.ln_post = nn.LayerNorm(c.d_model)
        self.blocks = nn.ModuleList(DecoderBlock(c) for _ in range(c.num_layers))
        self.ln = nn.LayerNorm(c.d_model)

    def encode(self, source, source_mask=None):
        x = self.source_embedding(source) + self.source_positions(torch.arange(source.shape[1], device=source.device))
        mask = None if source_mask is None else source_mask[:, None, None, :]
        for block in self.encoder_blocks:
            x = block(x, mask)
        return self.ln_post(x)

    def decode(self, target, memory, source_mask=None, target_mask=None, past=0, use_cache=False):
        T = target.shape[1]
        x = self.token_embedding(target)
        x = x + self.positional_embedding(torch.arange(past, past + T, device=target.device))
        mask = torch.ones(T, past + T, dtype=torch.bool, device=target.device).tril(past)
        if target_mask is not None:
            # a query always sees itself, so that no row is empty
            mask = mask & (target_mask[:, None, None, :] | torch.eye(T, dtype=torch.bool, device=target.device))
        memory_mask = None if source_mask is None else source_mask[:, None, None, :]
        for block in self.blocks:
            x = block(x, memory, memory_mask, mask, use_cache)
        return self.ln(x) @ self.token_embedding.weight.T

    def reset(self):
        for block in self.blocks:
            block.reset()


def forward(model, source, target, source_mask=None, target_mask=None):
    return model.decode(target, model.encode(source, source_mask), source_mask, target_mask)


@torch.no_grad()
def cached(model, source, chunks):
    model.reset()
    memory = model.encode(source)
    outputs, past = [], 0
    for chunk in chunks:
        outputs.append(model.decode(chunk, memory, past=past, use_cache=True))
        past += chunk.shape[1]
    return torch.cat(outputs, 1)


@torch.no_grad()
def generate(model, source, steps, use_cache):
    model.reset()
    memory = model.encode(source)
    tokens = source.new_full((source.shape[0], 1), START)
    for past in range(steps):
        if use_cache:
            logits = model.decode(tokens[:, -1:], memory, past=past, use_cache=True)
        else:
            logits = model.decode(tokens, memory)
        tokens = torch.cat((tokens, logits[:, -1].argmax(-1, keepdim=True)), 1)
    return tokens


subject = Subject(
    kind="encoder_decoder",
    name="Whisper on tokens",
    build=Whisperish,
    forward=forward,
    cache=cached,
    generate=generate,
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "tied": True,
        "activation": "gelu",
        "padding_side": "right",
    },
)
