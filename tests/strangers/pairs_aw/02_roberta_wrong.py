WHAT = "the position table gets padding_idx = pad + 1 = 2, which is the row of the first real token: that position is zero at the start and never gets a gradient (line 59)"
"""RoBERTa in the style of fairseq: positions are counted from the mask, pads sit at `padding_idx` of the table."""
import torch
import torch.nn.functional as F
from torch import nn

from veriformer.properties import Subject

PAD = 1


def make_positions(mask, padding_idx):
    mask = mask.int()
    return (torch.cumsum(mask, dim=1).type_as(mask) * mask).long() + padding_idx


class LearnedPositionalEmbedding(nn.Embedding):
    def __init__(self, num_embeddings, embedding_dim, padding_idx):
        super().__init__(num_embeddings + padding_idx + 1, embedding_dim, padding_idx=padding_idx)
        self.max_positions = num_embeddings

    def forward(self, mask, offset):
        return super().forward(make_positions(mask, offset))


class SentenceEncoderLayer(nn.Module):
    def __init__(self, dim, ffn_dim, heads, dropout):
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, ffn_dim), nn.Linear(ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def forward(self, x, key_mask):
        bsz, tgt_len, dim = x.shape
        residual = x
        q, k, v = (
            part.view(bsz, tgt_len, self.heads, dim // self.heads).transpose(1, 2)
            for part in self.in_proj(x).chunk(3, dim=-1)
        )
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=key_mask[:, None, None, :])
        x = self.out_proj(x.transpose(1, 2).reshape(bsz, tgt_len, dim))
        x = F.dropout(x, p=self.dropout, training=self.training)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = self.fc2(F.gelu(self.fc1(x)))
        x = F.dropout(x, p=self.dropout, training=self.training)
        return self.final_layer_norm(residual + x)


class RobertaEncoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.padding_idx = PAD
        self.embed_tokens = nn.Embedding(args.vocab_size, args.d_model, padding_idx=self.padding_idx)
        self.embed_positions = LearnedPositionalEmbedding(
            args.max_len, args.d_model, padding_idx=self.padding_idx + 1
        )
        self.emb_layer_norm = nn.LayerNorm(args.d_model)
        self.layers = nn.ModuleList(
            SentenceEncoderLayer(args.d_model, args.d_ff, args.num_heads, args.dropout)
            for _ in range(args.num_layers)
        )

    def forward(self, src_tokens, mask=None):
        if mask is None:
            mask = torch.ones_like(src_tokens, dtype=torch.bool)
        x = self.embed_tokens(src_tokens) + self.embed_positions(mask, self.padding_idx)
        x = self.emb_layer_norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        return x


subject = Subject(
    kind="encoder",
    name="RoBERTa",
    build=RobertaEncoder,
    forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
    declares={
        "causal": False,
        "positions": "learned",
        "position_offset": 2,
        "padding_idx": PAD,
        "padding_side": "both",
        "norm": "layer",
        "norm_placement": "post",
        "activation": "gelu",
    },
)
