"""The first Transformer (post-LN, sinusoids, three-way tied embeddings) in fairseq's manner: time first inside, modules that
take `query, key, value, key_padding_mask, attn_mask`, `forward_embedding` of encoder and decoder."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from veriformer.properties import DrawnConfig, Subject

WHAT = (
    "The encoder multiplies its token embeddings by sqrt(d_model) before the sinusoids are added, the decoder does not: "
    "in targets the positions outweigh the tokens. The declared embedding scale holds for the source alone."
)
PLACE = "WrongDecoder.forward_embedding"


def sinusoidal(length, dim, like):
    at = torch.arange(length, dtype=torch.float64, device=like.device)
    rate = torch.exp(torch.arange(0, dim, 2, dtype=torch.float64, device=like.device) * -(math.log(10000.0) / dim))
    angle = at[:, None] * rate
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1)[:, :dim].to(like.dtype)


class MultiheadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.scaling = num_heads, (embed_dim // num_heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim) for _ in range(4))

    def forward(self, query, key, value, key_padding_mask=None, attn_mask=None):
        T, B, C = query.shape
        q, k, v = (
            f(x).contiguous().view(-1, B * self.num_heads, C // self.num_heads).transpose(0, 1)
            for f, x in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value))
        )
        w = torch.bmm(q * self.scaling, k.transpose(1, 2)).view(B, self.num_heads, T, -1)
        hidden = torch.zeros(1, 1, T, w.shape[-1], dtype=torch.bool, device=w.device)
        if attn_mask is not None:
            hidden = hidden | attn_mask
        if key_padding_mask is not None:
            hidden = hidden | key_padding_mask[:, None, None]
        w = w.masked_fill(hidden, torch.finfo(w.dtype).min).softmax(-1).masked_fill(hidden, 0.0)
        out = torch.bmm(w.flatten(0, 1), v).transpose(0, 1).reshape(T, B, C)
        return self.out_proj(out)


class Layer(nn.Module):
    def __init__(self, c, decoder):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = MultiheadAttention(c.d_model, c.num_heads), nn.LayerNorm(c.d_model)
        if decoder:
            self.encoder_attn = MultiheadAttention(c.d_model, c.num_heads)
            self.encoder_attn_layer_norm = nn.LayerNorm(c.d_model)
        self.fc1, self.fc2 = nn.Linear(c.d_model, c.d_ff), nn.Linear(c.d_ff, c.d_model)
        self.final_layer_norm = nn.LayerNorm(c.d_model)
        self.dropout = nn.Dropout(c.dropout)

    def forward(self, x, padding, future=None, memory=None, memory_padding=None):
        x = self.self_attn_layer_norm(x + self.dropout(self.self_attn(x, x, x, padding, future)))
        if memory is not None:
            x = self.encoder_attn_layer_norm(x + self.dropout(self.encoder_attn(x, memory, memory, memory_padding)))
        return self.final_layer_norm(x + self.dropout(self.fc2(F.relu(self.fc1(x)))))


class Coder(nn.Module):
    def __init__(self, c, embed_tokens, decoder):
        super().__init__()
        self.embed_tokens, self.embed_scale = embed_tokens, math.sqrt(c.d_model)
        self.layers = nn.ModuleList(Layer(c, decoder) for _ in range(c.num_layers))
        self.dropout = nn.Dropout(c.dropout)

    def forward_embedding(self, tokens):
        x = self.embed_scale * self.embed_tokens(tokens)
        return self.dropout(x + sinusoidal(tokens.shape[1], x.shape[-1], x))


class Encoder(Coder):
    def forward(self, tokens, padding):
        x = self.forward_embedding(tokens).transpose(0, 1)
        for layer in self.layers:
            x = layer(x, padding)
        return x


class Decoder(Coder):
    def forward(self, tokens, padding, memory, memory_padding):
        x = self.forward_embedding(tokens).transpose(0, 1)
        future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        for layer in self.layers:
            x = layer(x, padding, future, memory, memory_padding)
        return F.linear(x.transpose(0, 1), self.embed_tokens.weight)


class WrongDecoder(Decoder):
    def forward_embedding(self, tokens):
        x = self.embed_tokens(tokens)
        return self.dropout(x + sinusoidal(tokens.shape[1], x.shape[-1], x))


class Transformer(nn.Module):
    def __init__(self, c, decoder):
        super().__init__()
        embed_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.encoder, self.decoder = Encoder(c, embed_tokens, False), decoder(c, embed_tokens, True)

    def forward(self, source, target, source_mask=None, target_mask=None):
        source_padding, target_padding = (None if m is None else ~m.bool() for m in (source_mask, target_mask))
        return self.decoder(target, target_padding, self.encoder(source, source_padding), source_padding)


def make(decoder):
    return Subject(
        kind="encoder_decoder",
        name="fairseq transformer",
        build=lambda c: Transformer(c, decoder),
        forward=lambda model, source, target, source_mask=None, target_mask=None: model(
            source, target, source_mask, target_mask
        ),
        declares={
            "embedding_scale": True, "positions": "sinusoidal", "layout": "interleaved", "base": 10000, "norm": "layer",
            "norm_placement": "post", "residual": True, "activation": "relu", "bias": True, "output_bias": False,
            "tied": True, "attention_scale": "1/sqrt(d_head)", "encodes_source": True, "padding_side": "right",
        },
    )  # fmt: skip


right, wrong = make(Decoder), make(WrongDecoder)


if __name__ == "__main__":
    torch.manual_seed(0)
    c = DrawnConfig(d_model=12, num_heads=3, num_layers=2)
    good, bad = right.build(c), wrong.build(c)
    with torch.no_grad():
        for name, p in good.named_parameters():
            p.normal_(float(name.endswith("norm.weight")), 0.4)
    bad.load_state_dict(good.state_dict())
    # torch's own Transformer layers with the same weights, and sinusoids number by number
    encoder = [nn.TransformerEncoderLayer(12, 3, 20, 0.0, batch_first=True).double() for _ in range(2)]
    decoder = [nn.TransformerDecoderLayer(12, 3, 20, 0.0, batch_first=True).double() for _ in range(2)]

    def fill(to, of):
        to.in_proj_weight.data = torch.cat([p.weight for p in (of.q_proj, of.k_proj, of.v_proj)]).detach().double()
        to.in_proj_bias.data = torch.cat([p.bias for p in (of.q_proj, of.k_proj, of.v_proj)]).detach().double()
        to.out_proj.load_state_dict(of.out_proj.state_dict())

    for to, of in [*zip(encoder, good.encoder.layers), *zip(decoder, good.decoder.layers)]:
        fill(to.self_attn, of.self_attn)
        pairs = [(to.linear1, of.fc1), (to.linear2, of.fc2), (to.norm1, of.self_attn_layer_norm)]
        if hasattr(of, "encoder_attn"):
            fill(to.multihead_attn, of.encoder_attn)
            pairs += [(to.norm2, of.encoder_attn_layer_norm), (to.norm3, of.final_layer_norm)]
        else:
            pairs += [(to.norm2, of.final_layer_norm)]
        for a, b in pairs:
            a.load_state_dict(b.state_dict())
    table = good.encoder.embed_tokens.weight.detach().double()

    def embedded(row):
        places = [[(math.sin, math.cos)[j % 2](i / 10000 ** ((j - j % 2) / 12)) for j in range(12)] for i in range(len(row))]
        return (table[row] * math.sqrt(12) + torch.tensor(places, dtype=torch.float64))[None]

    def slow(src, tgt):
        x, y = embedded(src), embedded(tgt)
        for layer in encoder:
            x = layer.train()(x)
        for layer in decoder:
            y = layer.train()(y, x, tgt_mask=torch.ones(len(tgt), len(tgt), dtype=torch.bool).triu(1))
        return y[0] @ table.T

    source, target = torch.randint(0, 11, (2, 7)), torch.randint(0, 11, (2, 6))
    ms = torch.arange(7)[None] < torch.tensor([7, 4])[:, None]
    mt = torch.arange(6)[None] < torch.tensor([4, 6])[:, None]
    truth = [slow(source[b][ms[b]], target[b][mt[b]]) for b in (0, 1)]
    for dtype, small in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        far = []
        for m in (good, bad):
            y = m.to(dtype)(source, target, ms, mt)
            far.append(max((y[b][mt[b]] - truth[b]).abs().max().item() for b in (0, 1)))
            assert (m(source, target[:, :3]) - m(source, target)[:, :3]).abs().max() < small
            print(dtype, "spread", y.std().item())
        print(dtype, "right %.1e wrong %.2f" % tuple(far))
        assert far[0] < small and far[1] > 0.1
