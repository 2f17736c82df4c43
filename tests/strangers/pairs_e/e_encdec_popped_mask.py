"""Encoder-decoder; what the cross-attention needs travels through the decoder layers in a dict."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "Each decoder layer pops the source mask from one shared dict, so only the first finds it and the others attend to padding."
PLACE = "decoder layer, reading memory_mask from the keyword dict"


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h, self.q, self.kv, self.o = h, nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)

    def forward(self, x, y, ok):
        q, k, v = (z.unflatten(-1, (self.h, -1)).transpose(1, 2) for z in (self.q(x), *self.kv(y).chunk(2, -1)))
        s = q @ k.mT / q.shape[-1] ** 0.5
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return self.o((w @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.me, self.cross, self.n1, self.n2 = Attention(d, h), Attention(d, h), nn.LayerNorm(d), nn.LayerNorm(d)

    def source(self, extra):
        return extra.get("memory_mask")

    def forward(self, x, ok, memory, extra):
        x = self.n1(x + self.me(x, x, ok))
        mask = self.source(extra)
        ok = torch.ones(1, 1, 1, memory.shape[1]).bool() if mask is None else mask.bool()[:, None, None]
        return self.n2(x + self.cross(x, memory, ok))


class Pops(Layer):
    def source(self, extra):
        return extra.pop("memory_mask", None)


class EncoderDecoder(nn.Module):
    def __init__(self, vocab, d, h, layers, cls):
        super().__init__()
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.enc = nn.ModuleList(Attention(d, h) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))
        self.dec = nn.ModuleList(cls(d, h) for _ in range(layers))

    def forward(self, source, target, source_mask=None, target_mask=None):
        see = [torch.ones_like(i).bool() if m is None else m.bool() for i, m in ((source, source_mask), (target, target_mask))]
        y, x = self.emb(source), self.emb(target)
        for f, n in zip(self.enc, self.norm):
            y = n(y + f(y, y, see[0][:, None, None]))
        ok = torch.ones(x.shape[1], x.shape[1]).bool().tril() & see[1][:, None, None]
        extra = {"memory_mask": source_mask}
        for layer in self.dec:
            x = layer(x, ok, y, extra)
        return self.head(x)


def subject(cls):
    return Subject(kind="encoder_decoder", mask_forms=("padding",),
                   build=lambda c: EncoderDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, cls),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "none", "norm": "layer", "norm_placement": "post",
                             "structure": "other", "padding_side": "both", "tied": False})


right, wrong = subject(Layer), subject(Pops)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    src, tgt, keep = torch.randint(0, 11, (1, 6)), torch.randint(0, 11, (1, 4)), torch.arange(6)[None] < 4
    ref = nn.MultiheadAttention(16, 2, batch_first=True)
    for layers, clash in ((1, False), (2, True)):
        a, z = (EncoderDecoder(11, 16, 2, layers, c) for c in (Layer, Pops))
        z.load_state_dict(a.state_dict())
        c, x, y = a.dec[0].cross, torch.randn(1, 4, 16), torch.randn(1, 6, 16)
        ref.load_state_dict({"in_proj_weight": torch.cat([c.q.weight, c.kv.weight]), "out_proj.bias": c.o.bias,
                             "in_proj_bias": torch.cat([c.q.bias, c.kv.bias]), "out_proj.weight": c.o.weight})
        assert torch.allclose(ref(x, y, y, key_padding_mask=~keep)[0], c(x, y, keep[:, None, None]), atol=1e-5)
        want = a(src[:, :4], tgt)  # without the padding at all
        dr, dw = ((m(src, tgt, keep) - want).abs().max().item() for m in (a, z))
        print(layers, "layers", dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
