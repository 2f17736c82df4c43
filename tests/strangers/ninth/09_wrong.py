"""Encoder-decoder transformer. The decoder attends to the normalised output of the encoder."""
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import einsum, nn

# helpers


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


# classes


class FeedForward(nn.Module):
    def __init__(self, dim, mult=4, dropout=0.):
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, dim * mult),
            nn.GELU(),
            nn.Dropout(dropout),
            nn.Linear(dim * mult, dim)
        )

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=16, causal=False, dropout=0.):
        super().__init__()
        inner_dim = heads * dim_head
        self.heads = heads
        self.scale = dim_head ** -0.5
        self.causal = causal
        self.norm = nn.LayerNorm(dim)
        self.to_q = nn.Linear(dim, inner_dim, bias=False)
        self.to_kv = nn.Linear(dim, inner_dim * 2, bias=False)
        self.to_out = nn.Linear(inner_dim, dim, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, context=None, mask=None):
        x = self.norm(x)
        kv_input = default(context, x)

        q, k, v = self.to_q(x), *self.to_kv(kv_input).chunk(2, dim=-1)
        q, k, v = map(lambda t: rearrange(t, 'b n (h d) -> b h n d', h=self.heads), (q, k, v))

        sim = einsum('b h i d, b h j d -> b h i j', q * self.scale, k)
        max_neg_value = -torch.finfo(sim.dtype).max

        if exists(mask):
            sim = sim.masked_fill(~rearrange(mask, 'b j -> b 1 1 j'), max_neg_value)

        if self.causal:
            i, j = sim.shape[-2:]
            causal_mask = torch.ones((i, j), dtype=torch.bool, device=x.device).triu(j - i + 1)
            sim = sim.masked_fill(causal_mask, max_neg_value)

        attn = self.dropout(sim.softmax(dim=-1))
        out = einsum('b h i j, b h j d -> b h i d', attn, v)
        out = rearrange(out, 'b h n d -> b n (h d)')
        return self.to_out(out)


class Encoder(nn.Module):
    def __init__(self, dim, depth, heads, dim_head, dropout=0.):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([
                Attention(dim, heads, dim_head, dropout=dropout),
                FeedForward(dim, dropout=dropout)
            ]))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, mask=None):
        for attn, ff in self.layers:
            x = attn(x, mask=mask) + x
            x = ff(x) + x
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self, dim, depth, heads, dim_head, dropout=0.):
        super().__init__()
        self.layers = nn.ModuleList([])
        for _ in range(depth):
            self.layers.append(nn.ModuleList([
                Attention(dim, heads, dim_head, causal=True, dropout=dropout),
                Attention(dim, heads, dim_head, dropout=dropout),
                FeedForward(dim, dropout=dropout)
            ]))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, context, context_mask=None):
        for attn, cross_attn, ff in self.layers:
            x = attn(x) + x
            x = cross_attn(x, context=context, mask=context_mask) + x
            x = ff(x) + x
        return self.norm(x)


class EncDecTransformer(nn.Module):
    def __init__(
        self,
        *,
        dim=64,
        num_tokens=80,
        enc_depth=2,
        dec_depth=2,
        heads=4,
        dim_head=16,
        max_seq_len=64,
        dropout=0.
    ):
        super().__init__()
        self.src_emb = nn.Embedding(num_tokens, dim)
        self.tgt_emb = nn.Embedding(num_tokens, dim)
        self.src_pos = nn.Embedding(max_seq_len, dim)
        self.tgt_pos = nn.Embedding(max_seq_len, dim)
        self.encoder = Encoder(dim, enc_depth, heads, dim_head, dropout)
        self.decoder = Decoder(dim, dec_depth, heads, dim_head, dropout)
        self.to_logits = nn.Linear(dim, num_tokens)

    def forward(self, src, tgt, src_mask=None, return_loss=False):
        device = src.device
        labels = None
        if return_loss:
            tgt, labels = tgt[:, :-1], tgt[:, 1:]

        x = self.src_emb(src) + self.src_pos(torch.arange(src.shape[1], device=device))
        encoded = self.encoder(x, mask=src_mask)

        y = self.tgt_emb(tgt) + self.tgt_pos(torch.arange(tgt.shape[1], device=device))
        y = self.decoder(y, context=x, context_mask=src_mask)
        logits = self.to_logits(y)

        if not return_loss:
            return logits
        return F.cross_entropy(rearrange(logits, 'b n c -> b c n'), labels)
