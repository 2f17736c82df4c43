"""An encoder-decoder that decodes step by step, keys and values kept in its modules."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class MultiheadAttention(nn.Module):
    """fairseq's: with `incremental` it keeps what it has seen; of an encoder (`static_kv`) it is computed once."""

    def __init__(self, embed_dim, num_heads, static_kv=False):
        super().__init__()
        self.num_heads, self.head_dim, self.static_kv = num_heads, embed_dim // num_heads, static_kv
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.saved = None

    def heads(self, x):
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).transpose(1, 2)

    def keys_and_values(self, source, incremental):
        if not incremental:
            return self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
        if self.static_kv:
            if self.saved is None or self.saved[0].shape[::2] != source.shape[:2]:
                self.saved = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
            return self.saved
        k, v = self.heads(self.k_proj(source)), self.heads(self.v_proj(source))
        if self.saved is not None:
            k, v = torch.cat([self.saved[0], k], dim=2), torch.cat([self.saved[1], v], dim=2)
        self.saved = k, v
        return k, v

    def forward(self, query, source, mask=None, incremental=False):
        q = self.heads(self.q_proj(query)) * self.head_dim**-0.5
        k, v = self.keys_and_values(source, incremental)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k)
        if mask is not None:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        out = torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, d_ff):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, d_ff), nn.Linear(d_ff, dim)

    def forward(self, x, mask):
        h = self.norm1(x)
        x = x + self.self_attn(h, h, mask)
        return x + self.fc2(F.relu(self.fc1(self.norm2(x))))


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads, d_ff):
        super().__init__()
        self.self_attn = MultiheadAttention(dim, heads)
        self.cross_attn = MultiheadAttention(dim, heads, static_kv=True)
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, d_ff), nn.Linear(d_ff, dim)

    def forward(self, x, memory, mask, memory_mask, incremental):
        h = self.norm1(x)
        x = x + self.self_attn(h, h, mask, incremental)
        x = x + self.cross_attn(self.norm2(x), memory, memory_mask, incremental)
        return x + self.fc2(F.relu(self.fc1(self.norm3(x))))

    def reset(self):
        self.self_attn.saved = None
        self.cross_attn.saved = None


class Seq2Seq(nn.Module):
    def __init__(self, vocab, dim, heads, layers, d_ff, max_len):
        super().__init__()
        self.src_embed, self.tgt_embed = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.src_pos, self.tgt_pos = nn.Embedding(max_len, dim), nn.Embedding(max_len, dim)
        self.encoder = nn.ModuleList([EncoderLayer(dim, heads, d_ff) for _ in range(layers)])
        self.decoder = nn.ModuleList([DecoderLayer(dim, heads, d_ff) for _ in range(layers)])
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab)

    def encode(self, source, source_mask=None):
        mask = None if source_mask is None else source_mask[:, None, None, :]
        x = self.src_embed(source) + self.src_pos(torch.arange(source.size(1), device=source.device))
        for layer in self.encoder:
            x = layer(x, mask)
        return self.encoder_norm(x), mask

    def decode(self, target, memory, memory_mask=None, target_mask=None, start=0, incremental=False):
        length = target.size(1)
        mask = torch.ones(length, start + length, dtype=torch.bool, device=target.device).tril(start)
        if target_mask is not None:
            mask = mask & target_mask[:, None, None, :]
        x = self.tgt_embed(target) + self.tgt_pos(torch.arange(start, start + length, device=target.device))
        for layer in self.decoder:
            x = layer(x, memory, mask, memory_mask, incremental)
        return self.output(self.decoder_norm(x))

    def forward(self, source, target, source_mask=None, target_mask=None):
        memory, memory_mask = self.encode(source, source_mask)
        return self.decode(target, memory, memory_mask, target_mask)

    @torch.no_grad()
    def incremental(self, source, chunks):
        for layer in self.decoder:
            layer.reset()
        memory, _ = self.encode(source)
        outputs, start = [], 0
        for chunk in chunks:
            outputs.append(self.decode(chunk, memory, start=start, incremental=True))
            start += chunk.size(1)
        return torch.cat(outputs, dim=1)


subject = Subject(
    kind="encoder_decoder",
    name="incremental",
    build=lambda c: Seq2Seq(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
    cache=lambda m, source, chunks: m.incremental(source, chunks),
    declares={
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "relu",
        "tied": False,
        "padding_side": "right",
    },
)
