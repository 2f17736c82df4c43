WHAT = "bucketize without right=True puts the first token of every sequence but the first into the sequence before it, so that samples of a batch attend to each other (line 54)."
"""An encoder that takes padding out before the first layer and puts it back behind the last (ModernBERT's trick)."""
import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import Subject


class VarlenAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.Wqkv = nn.Linear(hidden, 3 * hidden)
        self.Wo = nn.Linear(hidden, hidden)

    def forward(self, x, block_mask):
        n, d = x.shape
        q, k, v = self.Wqkv(x).view(n, 3, self.heads, d // self.heads).permute(1, 2, 0, 3)
        scores = torch.einsum("hik,hjk->hij", q, k) / (d // self.heads) ** 0.5
        probs = scores.masked_fill(~block_mask, -torch.inf).softmax(-1)
        return self.Wo(torch.einsum("hij,hjk->ihk", probs, v).reshape(n, d))


class UnpaddedBlock(nn.Module):
    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.attn_norm = nn.LayerNorm(hidden)
        self.attn = VarlenAttention(hidden, heads)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.Wi = nn.Linear(hidden, inner)
        self.Wout = nn.Linear(inner, hidden)

    def forward(self, x, block_mask):
        x = x + self.attn(self.attn_norm(x), block_mask)
        return x + self.Wout(F.gelu(self.Wi(self.mlp_norm(x))))


class UnpaddedEncoder(nn.Module):
    def __init__(self, vocab, hidden, heads, layers, inner, max_len):
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        self.pos = nn.Embedding(max_len, hidden)
        self.layers = nn.ModuleList(UnpaddedBlock(hidden, heads, inner) for _ in range(layers))
        self.final_norm = nn.LayerNorm(hidden)

    def forward(self, tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(tokens, dtype=torch.bool)
        # unpad
        lengths = mask.sum(1)
        ends = lengths.cumsum(0)  # cu_seqlens[1:]
        index = torch.arange(int(ends[-1]), device=tokens.device)
        sequence = torch.bucketize(index, ends)
        position = (mask.cumsum(1) - 1)[mask]
        block_mask = sequence[:, None] == sequence[None, :]

        x = self.tok(tokens[mask]) + self.pos(position)
        for layer in self.layers:
            x = layer(x, block_mask)
        x = self.final_norm(x)
        # pad
        out = x.new_zeros(*tokens.shape, x.shape[-1])
        return out.index_put(mask.nonzero(as_tuple=True), x)


subject = Subject(
    kind="encoder",
    name="unpadded encoder",
    build=lambda c: UnpaddedEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.max_len),
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "norm": "layer",
        "norm_placement": "pre",
        "final_norm": True,
        "activation": "gelu",
        "padding_side": "both",
        "bias": True,
    },
)
