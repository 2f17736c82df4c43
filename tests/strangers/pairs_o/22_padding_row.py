"""A RoBERTa-like sentence encoder in the manner of fairseq: padding is token 1, positions are counted from 2."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject

PAD = 1

WHAT = "The initialisation draws the whole embedding table anew, the row of the padding token included."
CAUSE = (
    "init_params fills embedding tables with normal_() and does not set row padding_idx back to zero, which nn.Embedding "
    "had made so: the padding token keeps a random vector that no gradient ever reaches."
)


def init_params(module):
    """As in BERT; applied to every module when all are made."""
    if isinstance(module, nn.Linear):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.bias is not None:
            module.bias.data.zero_()
    if isinstance(module, nn.Embedding):
        module.weight.data.normal_(mean=0.0, std=0.02)
        if module.padding_idx is not None:
            module.weight.data[module.padding_idx].zero_()


def init_params_short(module):
    if isinstance(module, (nn.Linear, nn.Embedding)):
        module.weight.data.normal_(mean=0.0, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.bias.data.zero_()


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.scaling = num_heads, (embed_dim // num_heads) ** -0.5
        self.in_proj = nn.Linear(embed_dim, 3 * embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def forward(self, x, key_padding_mask):
        # T x B x C, as in fairseq
        tgt_len, bsz, embed_dim = x.size()
        q, k, v = self.in_proj(x).chunk(3, dim=-1)
        q, k, v = (t.reshape(tgt_len, bsz * self.num_heads, -1).transpose(0, 1) for t in (q, k, v))
        attn = torch.bmm(q * self.scaling, k.transpose(1, 2)).view(bsz, self.num_heads, tgt_len, tgt_len)
        attn = attn.masked_fill(key_padding_mask[:, None, None, :], torch.finfo(attn.dtype).min)
        attn = F.softmax(attn, dim=-1).view(bsz * self.num_heads, tgt_len, tgt_len)
        return self.out_proj(torch.bmm(attn, v).transpose(0, 1).reshape(tgt_len, bsz, embed_dim))


class TransformerSentenceEncoderLayer(nn.Module):
    def __init__(self, embed_dim, num_heads, ffn_dim):
        super().__init__()
        self.self_attn = MultiheadAttention(embed_dim, num_heads)
        self.self_attn_layer_norm = nn.LayerNorm(embed_dim)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.final_layer_norm = nn.LayerNorm(embed_dim)

    def forward(self, x, key_padding_mask):
        x = self.self_attn_layer_norm(x + self.self_attn(x, key_padding_mask))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


class TransformerSentenceEncoder(nn.Module):
    def __init__(self, vocab, max_len, embed_dim, num_heads, num_layers, ffn_dim, init):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, embed_dim, padding_idx=PAD)
        self.embed_positions = nn.Embedding(max_len + PAD + 1, embed_dim)
        self.emb_layer_norm = nn.LayerNorm(embed_dim)
        self.layers = nn.ModuleList(
            [TransformerSentenceEncoderLayer(embed_dim, num_heads, ffn_dim) for _ in range(num_layers)]
        )
        self.apply(init)

    def forward(self, tokens, padding_mask):
        positions = torch.arange(tokens.size(1), device=tokens.device) + PAD + 1
        x = self.emb_layer_norm(self.embed_tokens(tokens) + self.embed_positions(positions))
        x = x.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding_mask)
        return x.transpose(0, 1)


def forward(model, tokens, attention_mask=None):
    hidden = torch.zeros_like(tokens, dtype=torch.bool) if attention_mask is None else ~attention_mask.bool()
    return model(tokens, hidden)


def subject(init):
    return Subject(
        kind="encoder",
        name="sentence encoder",
        build=lambda c: TransformerSentenceEncoder(
            c.vocab_size, c.max_len, c.d_model, c.num_heads, c.num_layers, c.d_ff, init
        ),
        forward=forward,
        mask_forms=("padding",),
        declares={"causal": False, "positions": "learned", "position_offset": PAD + 1, "padding_idx": PAD,
                  "padding_side": "right", "norm_placement": "post", "activation": "gelu"},
    )  # fmt: skip


right, wrong = subject(init_params), subject(init_params_short)
