"""An encoder that computes real tokens alone: the batch is unpadded into one stream and padded again at the end."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

WHAT = "The first token of every sample but the first is counted to the sample before it."
CAUSE = (
    "The sample of a token in the packed stream is looked up in the cumulative lengths with searchsorted on the wrong "
    "side (right=False): a token that lies exactly on a boundary gets the sequence before, and the block-diagonal mask "
    "lets it see that sample's tokens and hides it from its own."
)


class UnpaddedAttention(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.Wqkv = nn.Linear(hidden_size, 3 * hidden_size)
        self.Wo = nn.Linear(hidden_size, hidden_size)

    def forward(self, x, same):
        # x [N, D], same [N, N]
        n, hidden = x.shape
        q, k, v = self.Wqkv(x).view(n, 3, self.num_heads, hidden // self.num_heads).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=same)
        return self.Wo(out.transpose(0, 1).reshape(n, hidden))


class UnpaddedLayer(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, intermediate_size: int):
        super().__init__()
        self.attn_norm = nn.LayerNorm(hidden_size)
        self.attn = UnpaddedAttention(hidden_size, num_heads)
        self.mlp_norm = nn.LayerNorm(hidden_size)
        self.Wi = nn.Linear(hidden_size, intermediate_size)
        self.Wo = nn.Linear(intermediate_size, hidden_size)

    def forward(self, x, same):
        x = x + self.attn(self.attn_norm(x), same)
        return x + self.Wo(F.gelu(self.Wi(self.mlp_norm(x))))


class UnpaddedEncoder(nn.Module):
    def __init__(self, vocab_size, max_len, hidden_size, num_heads, num_layers, intermediate_size):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, hidden_size)
        self.pos_embeddings = nn.Embedding(max_len, hidden_size)
        self.layers = nn.ModuleList(
            [UnpaddedLayer(hidden_size, num_heads, intermediate_size) for _ in range(num_layers)]
        )
        self.final_norm = nn.LayerNorm(hidden_size)

    @staticmethod
    def sequence_of(place, cu_seqlens):
        """Number of the sequence that holds each place of the stream; sequence i is cu_seqlens[i] .. cu_seqlens[i+1]-1."""
        return torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)

    def forward(self, tokens, attention_mask=None):
        mask = torch.ones_like(tokens, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
        # unpad
        stream = tokens[mask]
        positions = (mask.long().cumsum(dim=1) - 1)[mask]
        cu_seqlens = F.pad(mask.sum(dim=1).cumsum(dim=0), (1, 0))
        sequence = self.sequence_of(torch.arange(stream.numel(), device=tokens.device), cu_seqlens)
        same = sequence[:, None] == sequence[None, :]
        # encode
        x = self.tok_embeddings(stream) + self.pos_embeddings(positions)
        for layer in self.layers:
            x = layer(x, same)
        x = self.final_norm(x)
        # pad
        out = x.new_zeros(*tokens.shape, x.shape[-1])
        out[mask] = x
        return out


class UnpaddedEncoderLeft(UnpaddedEncoder):
    @staticmethod
    def sequence_of(place, cu_seqlens):
        return torch.searchsorted(cu_seqlens[1:].contiguous(), place)


def subject(cls):
    return Subject(
        kind="encoder",
        name="unpadded encoder",
        build=lambda c: cls(c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff),
        forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
        mask_forms=("padding",),
        declares={"causal": False, "positions": "learned", "padding_side": "both", "norm_placement": "pre",
                  "activation": "gelu"},
    )  # fmt: skip


right, wrong = subject(UnpaddedEncoder), subject(UnpaddedEncoderLeft)
