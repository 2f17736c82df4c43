"""TransformerEncoder of fairseq's wav2vec 2.0 over tokens: positions come from a grouped convolution added to the input."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from veriformer.properties import Subject


class SamePad(nn.Module):
    def __init__(self, kernel_size):
        super().__init__()
        self.remove = 1 if kernel_size % 2 == 0 else 0

    def forward(self, x):
        return x[:, :, : -self.remove] if self.remove else x


class SentenceEncoderLayer(nn.Module):
    def __init__(self, d, heads, ff):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, padding_mask):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        s = (q * (D // self.heads) ** -0.5) @ k.transpose(-1, -2)
        if padding_mask is not None:
            s = s.masked_fill(padding_mask[:, None, None, :], torch.finfo(s.dtype).min)
        x = self.self_attn_layer_norm(x + self.out_proj((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D)))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


class TransformerEncoder(nn.Module):
    def __init__(self, vocab, d, heads, layers, ff, conv_pos=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, d)
        conv = nn.Conv1d(d, d, kernel_size=conv_pos, padding=conv_pos // 2, groups=heads)
        self.pos_conv = nn.Sequential(conv, SamePad(conv_pos), nn.GELU())
        self.layer_norm = nn.LayerNorm(d)
        self.layers = nn.ModuleList(SentenceEncoderLayer(d, heads, ff) for _ in range(layers))

    def forward(self, tokens, padding_mask=None):
        x = self.embed(tokens)
        if padding_mask is not None:
            x = x.masked_fill(padding_mask[..., None], 0.0)
        x_conv = self.pos_conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.layer_norm(x + x_conv)
        for layer in self.layers:
            x = layer(x, padding_mask)
        return x


subject = Subject(
    kind="encoder",
    name="wav2vec encoder",
    build=lambda c: TransformerEncoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m, tokens, attention_mask=None: m(tokens, None if attention_mask is None else ~attention_mask),
    declares={"causal": False, "positions": "other", "norm_placement": "post", "activation": "gelu"},
)
