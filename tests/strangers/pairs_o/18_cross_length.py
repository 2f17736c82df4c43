"""The Transformer of the paper, source to target, decoded step by step with keys and values of both attentions kept."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject

WHAT = "A cached step counts its position from the length of the cross-attention's keys, that is of the source."
CAUSE = (
    "The number of target tokens already decoded is read off the last tensor that a layer keeps, which holds the "
    "memory's values, not the decoder's own: after the first chunk sinusoidal positions start at the source length."
)


def sinusoidal(start, length, dim, like):
    places = torch.arange(start, start + length, dtype=torch.float64, device=like.device)[:, None]
    channels = torch.arange(dim, device=like.device)
    angles = places / 10000.0 ** ((channels - channels % 2).double() / dim)
    return torch.where(channels % 2 == 0, angles.sin(), angles.cos()).to(like.dtype)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def split(self, x):
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def keys(self, x):
        return self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def forward(self, query, kept, visible):
        k, v = kept
        scores = self.split(self.q_proj(query)) @ k.mT / math.sqrt(k.shape[-1])
        weights = scores.masked_fill(~visible, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Of the encoder, or with `crossed` of the decoder."""

    def __init__(self, dim, heads, ffn, crossed):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = MultiheadAttention(dim, heads), nn.LayerNorm(dim)
        if crossed:
            self.encoder_attn, self.encoder_attn_layer_norm = MultiheadAttention(dim, heads), nn.LayerNorm(dim)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(dim, ffn), nn.Linear(ffn, dim), nn.LayerNorm(dim)

    def forward(self, x, visible, memory=None, memory_visible=None, past=None):
        own = self.self_attn.keys(x)
        if past is not None:
            own = tuple(torch.cat(both, dim=2) for both in zip(past[:2], own))
        x = self.self_attn_layer_norm(x + self.self_attn(x, own, visible))
        cross = ()
        if memory is not None:
            cross = self.encoder_attn.keys(memory) if past is None else past[2:]
            x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, cross, memory_visible))
        return self.final_layer_norm(x + self.fc2(F.relu(self.fc1(x)))), (*own, *cross)


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim, heads, layers, ffn):
        super().__init__()
        self.source_tokens, self.target_tokens = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList(Layer(dim, heads, ffn, crossed=False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(dim, heads, ffn, crossed=True) for _ in range(layers))
        self.output_projection = nn.Linear(dim, vocab, bias=False)

    def embed(self, table, tokens, start=0):
        x = table(tokens) * math.sqrt(table.embedding_dim)
        return x + sinusoidal(start, tokens.shape[1], table.embedding_dim, x)

    def encode(self, source, source_mask=None):
        mask = torch.ones_like(source) if source_mask is None else source_mask
        visible, x = mask.bool()[:, None, None, :], self.embed(self.source_tokens, source)
        for layer in self.encoder:
            x, _ = layer(x, visible)
        return x, visible

    def past_length(self, past):
        return past[0][0].shape[2]

    def decode(self, target, memory, memory_visible, target_mask=None, past=None):
        new, before = target.shape[1], 0 if past is None else past[0][0].shape[2]
        visible = torch.ones(new, before + new, dtype=torch.bool, device=target.device).tril(before)
        if target_mask is not None:
            visible = visible & target_mask.bool()[:, None, None, :]
        x = self.embed(self.target_tokens, target, 0 if past is None else self.past_length(past))
        kept = []
        for i, layer in enumerate(self.decoder):
            x, present = layer(x, visible, memory, memory_visible, None if past is None else past[i])
            kept.append(present)
        return self.output_projection(x), kept

    def forward(self, source, target, source_mask=None, target_mask=None):
        return self.decode(target, *self.encode(source, source_mask), target_mask)[0]


class Seq2SeqLastLength(Seq2Seq):
    def past_length(self, past):
        return past[0][-1].shape[2]


@torch.no_grad()
def step_by_step(model, source, chunks):
    encoded, outputs, past = model.encode(source), [], None
    for chunk in chunks:
        logits, past = model.decode(chunk, *encoded, past=past)
        outputs.append(logits)
    return torch.cat(outputs, dim=1)


def subject(cls):
    return Subject(
        kind="encoder_decoder",
        build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=lambda m, source, target, source_mask=None, target_mask=None: m(
            source, target, source_mask, target_mask
        ),
        cache=step_by_step,
        mask_forms=("padding",),
        declares={"positions": "sinusoidal", "layout": "interleaved", "embedding_scale": True, "norm_placement": "post",
                  "activation": "relu"},
    )  # fmt: skip


right, wrong = subject(Seq2Seq), subject(Seq2SeqLastLength)
