import math
import torch
import torch.nn as nn
import torch.nn.functional as F


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, query, key_padding_mask=None):
        T, B, C = query.shape
        q = self.q_proj(query) * self.head_dim ** -0.5
        k, v = self.k_proj(query), self.v_proj(query)
        q, k, v = (t.contiguous().view(T, B * self.num_heads, self.head_dim).transpose(0, 1) for t in (q, k, v))
        w = torch.bmm(q, k.transpose(1, 2))
        if key_padding_mask is not None:
            w = w.view(B, self.num_heads, T, T).masked_fill(key_padding_mask[:, None, None, :], float("-inf"))
            w = w.view(B * self.num_heads, T, T)
        y = torch.bmm(F.softmax(w, dim=-1), v).transpose(0, 1).contiguous().view(T, B, C)
        return self.out_proj(y)


class EncoderLayer(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.self_attn = MultiheadAttention(args.encoder_embed_dim, args.encoder_attention_heads)
        self.norm1, self.norm2 = nn.LayerNorm(args.encoder_embed_dim), nn.LayerNorm(args.encoder_embed_dim)
        self.fc1 = nn.Linear(args.encoder_embed_dim, args.encoder_ffn_embed_dim)
        self.fc2 = nn.Linear(args.encoder_ffn_embed_dim, args.encoder_embed_dim)

    def forward(self, x, encoder_padding_mask):
        x = self.norm1(x + self.self_attn(x, encoder_padding_mask))
        return self.norm2(x + self.fc2(F.relu(self.fc1(x))))


class TransformerEncoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.encoder_embed_dim)
        self.embed_positions = nn.Embedding(args.max_source_positions, args.encoder_embed_dim)
        self.layers = nn.ModuleList([EncoderLayer(args) for _ in range(args.encoder_layers)])
        self.scale = math.sqrt(args.encoder_embed_dim)

    def forward(self, src_tokens, encoder_padding_mask=None):
        x = self.scale * self.embed_tokens(src_tokens) + self.embed_positions(torch.arange(src_tokens.size(1)))
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, encoder_padding_mask)
        return {"encoder_out": [x.transpose(0, 1)], "encoder_padding_mask": encoder_padding_mask}
