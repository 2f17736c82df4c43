"""A fairseq-like decoder that recomputes its layers in the backward pass (activation checkpointing)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from veriformer.properties import Subject


class TransformerDecoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim, dropout):
        super().__init__()
        self.embed_dim, self.num_heads, self.head_dim = embed_dim, num_heads, embed_dim // num_heads
        self.scaling = self.head_dim**-0.5
        self.dropout = dropout
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def self_attn(self, x, mask):
        bsz, tgt_len, _ = x.shape

        def heads(z):
            return z.view(bsz, tgt_len, self.num_heads, self.head_dim).transpose(1, 2)

        q, k, v = heads(self.q_proj(x) * self.scaling), heads(self.k_proj(x)), heads(self.v_proj(x))
        probs = F.softmax(torch.matmul(q, k.transpose(2, 3)) + mask, dim=-1)
        probs = F.dropout(probs, self.dropout, self.training)
        return self.out_proj(torch.matmul(probs, v).transpose(1, 2).reshape(bsz, tgt_len, self.embed_dim))

    def forward(self, x, mask):
        residual = x
        x = F.dropout(self.self_attn(x, mask), self.dropout, self.training)
        x = self.self_attn_layer_norm(residual + x)
        residual = x
        x = F.dropout(self.fc2(F.relu(self.fc1(x))), self.dropout, self.training)
        return self.final_layer_norm(residual + x)


class TransformerDecoder(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.d_model)
        self.embed_positions = nn.Embedding(args.max_len, args.d_model)
        self.dropout = args.dropout
        self.layers = nn.ModuleList(
            [TransformerDecoderLayer(args.d_model, args.num_heads, args.d_ff, args.dropout) for _ in range(args.num_layers)]
        )
        self.output_projection = nn.Linear(args.d_model, args.vocab_size, bias=False)

    def forward(self, prev_output_tokens):
        length = prev_output_tokens.size(1)
        x = self.embed_tokens(prev_output_tokens)
        x = x + self.embed_positions(torch.arange(length, device=x.device))
        x = F.dropout(x, self.dropout, self.training)
        mask = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        for layer in self.layers:
            if self.training and torch.is_grad_enabled():
                x = checkpoint(layer, x, mask, use_reentrant=False, preserve_rng_state=True)
            else:
                x = layer(x, mask)
        return self.output_projection(x)


subject = Subject(
    kind="decoder",
    name="checkpointed decoder",
    build=TransformerDecoder,
    forward=lambda model, tokens: model(tokens),
    declares={"positions": "learned", "norm": "layer", "norm_placement": "post", "activation": "relu"},
)
