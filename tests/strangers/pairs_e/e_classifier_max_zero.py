"""Classifier that takes the maximum over time."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "Padding is set to zero rather than to the lowest number before the maximum, so a channel that is negative throughout pools to zero."
PLACE = "max pooling under the mask"


def lowest(x):
    return torch.finfo(x.dtype).min


def zero(x):
    return 0.0


class Classifier(nn.Module):
    def __init__(self, vocab, d, h, layers, classes, fill):
        super().__init__()
        self.h, self.fill = h, fill
        self.emb, self.head = nn.Embedding(vocab, d), nn.Linear(d, classes)
        self.norm = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers + 1))
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))

    def forward(self, ids, mask=None):
        x = self.emb(ids)
        mask = torch.ones_like(ids).bool() if mask is None else mask.bool()
        hide = ~mask[:, None, None]
        for n, f, o in zip(self.norm, self.qkv, self.out):
            q, k, v = f(n(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
            s = q @ k.mT * q.shape[-1] ** -0.5
            w = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
            x = x + o((w @ v).transpose(1, 2).flatten(2))
        x = self.norm[-1](x)
        pooled = x.masked_fill(~mask[..., None], self.fill(x)).amax(1)
        return self.head(pooled.masked_fill(~mask.any(1, keepdim=True), 0.0))


def subject(fill):
    return Subject(kind="classifier", mask_forms=("padding",),
                   build=lambda c: Classifier(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.num_classes, fill),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "pooling": "max", "positions": "none", "norm": "layer",
                             "norm_placement": "pre", "final_norm": True, "padding_side": "both"})


right, wrong = subject(lowest), subject(zero)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Classifier(11, 16, 2, 1, 3, lowest), Classifier(11, 16, 2, 1, 3, zero)
    z.load_state_dict(a.state_dict())
    ids = torch.randint(0, 11, (1, 6))
    for real, clash in ((6, False), (2, True)):
        u = a.emb(ids[:, :real])
        q, k, v = (p.view(1, real, 2, 8).transpose(1, 2) for p in a.qkv[0](a.norm[0](u)).chunk(3, -1))
        y = u + a.out[0](((q @ k.mT / 8 ** 0.5).softmax(-1) @ v).transpose(1, 2).reshape(1, real, 16))
        want = a.head(a.norm[1](y).max(1).values)
        dr, dw = ((m(ids, torch.arange(6)[None] < real) - want).abs().max().item() for m in (a, z))
        print(real, "real", dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
