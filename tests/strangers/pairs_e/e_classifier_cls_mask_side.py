"""Classifier with a learned class token in front of its input."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "The mask is lengthened at its end although the class token stands in front: the first pad is read and a real token may be hidden."
PLACE = "padding of attention_mask for the class token"


def front(mask):
    return F.pad(mask, (1, 0), value=True)


def back(mask):
    return F.pad(mask, (0, 1), value=True)


class Classifier(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, classes, longer):
        super().__init__()
        self.longer = longer
        self.emb, self.cls = nn.Embedding(vocab, d), nn.Parameter(torch.randn(1, 1, d))
        layer = nn.TransformerEncoderLayer(d, h, ff, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(d), enable_nested_tensor=False)
        self.head = nn.Linear(d, classes)

    def forward(self, ids, mask=None):
        x = torch.cat([self.cls.expand(len(ids), -1, -1), self.emb(ids)], 1)
        hide = None if mask is None else ~self.longer(mask.bool())
        return self.head(self.body(x, src_key_padding_mask=hide)[:, 0])


def subject(longer):
    return Subject(kind="classifier", mask_forms=("padding",),
                   build=lambda c: Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, c.num_classes, longer),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "pooling": "cls", "extra_tokens": 1, "positions": "none", "norm": "layer",
                             "norm_placement": "pre", "final_norm": True, "activation": "relu", "padding_side": "both"})


right, wrong = subject(front), subject(back)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Classifier(11, 16, 2, 1, 32, 3, front).eval(), Classifier(11, 16, 2, 1, 32, 3, back).eval()
    z.load_state_dict(a.state_dict())
    ids, m = torch.randint(0, 11, (1, 6)), a.body.layers[0]
    for real, clash in ((6, False), (3, True)):
        x = torch.cat([a.cls, a.emb(ids[:, :real])], 1)
        u = m.norm1(x) @ m.self_attn.in_proj_weight.T + m.self_attn.in_proj_bias
        q, k, v = (p.reshape(1, real + 1, 2, 8).transpose(1, 2) for p in u.chunk(3, -1))
        y = x + m.self_attn.out_proj(((q @ k.mT / 8 ** 0.5).softmax(-1) @ v).transpose(1, 2).reshape(1, real + 1, 16))
        y = y + m.linear2(m.linear1(m.norm2(y)).relu())
        want = a.head(a.body.norm(y[:, 0]))
        dr, dw = ((n(ids, torch.arange(6)[None] < real) - want).abs().max().item() for n in (a, z))
        print(real, "real", dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
