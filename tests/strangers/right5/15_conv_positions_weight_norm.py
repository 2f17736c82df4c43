WHAT = "wav2vec 2.0: positions by a grouped convolution under weight norm (a parametrization) over zeroed padding, post-norm layers, query and value biases but none for keys"
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm


class ConvPositions(nn.Module):
    def __init__(self, d, groups, width=5):
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(d, d, width, padding=width // 2, groups=groups), name="weight", dim=2)

    def forward(self, x):
        return F.gelu(self.conv(x.transpose(1, 2))).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, d, h, ff, p):
        super().__init__()
        self.h, self.p = h, p
        self.q, self.k, self.v, self.o = nn.Linear(d, d), nn.Linear(d, d, bias=False), nn.Linear(d, d), nn.Linear(d, d)
        self.a, self.b = nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, ff), nn.Linear(ff, d)

    def forward(self, x, keep):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.h, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = None
        if keep is not None:
            bias = torch.zeros(B, 1, 1, T, dtype=x.dtype, device=x.device)
            bias = bias.masked_fill(~keep[:, None, None], torch.finfo(x.dtype).min / 2).expand(B, 1, T, T)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=self.p if self.training else 0.0)
        x = self.a(x + self.o(y.transpose(1, 2).reshape(B, T, D)))
        return self.b(x + F.dropout(self.down(F.gelu(self.up(x))), self.p, self.training))


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, p):
        super().__init__()
        self.features = nn.Embedding(vocab, d)
        self.pos_conv_embed, self.layer_norm = ConvPositions(d, h), nn.LayerNorm(d)
        self.layers = nn.ModuleList(Layer(d, h, ff, p) for _ in range(layers))

    def forward(self, ids, keep=None):
        x = self.features(ids)
        if keep is not None:
            x = x.masked_fill(~keep[..., None], 0.0)
        x = self.layer_norm(x + self.pos_conv_embed(x))
        for layer in self.layers:
            x = layer(x, keep)
        return x


from veriformer.properties import Subject


def build(c):
    return Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.dropout)


def forward(model, tokens, attention_mask=None):
    return model(tokens, attention_mask)


undeclared = Subject(kind="encoder", build=build, forward=forward)
declared = Subject(
    kind="encoder", name="conv positions", build=build, forward=forward,
    declares={"causal": False, "positions": "other", "norm": "layer", "norm_placement": "post", "activation": "gelu",
              "structure": "other", "padding_side": "both", "beyond_max_len": "works"},
)
