"""Encoder whose padding embedding is zero; BERT-like initialisation."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "Initialisation draws the whole embedding table anew and overwrites the zero row of padding_idx, which then never trains away."
PLACE = "init_weights, branch for nn.Embedding"
PAD = 0


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, ff):
        super().__init__()
        self.h, self.emb = h, nn.Embedding(vocab, d, padding_idx=PAD)
        self.qkv, self.o, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, ff), nn.Linear(ff, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.apply(self.init_weights)

    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=0.2)
            nn.init.zeros_(m.bias)
        elif isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, std=0.2)
            with torch.no_grad():
                m.weight[m.padding_idx].zero_()

    def forward(self, ids, mask=None):
        x = self.emb(ids)
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / q.shape[-1] ** 0.5
        ok = torch.ones_like(s, dtype=torch.bool)
        if mask is not None:
            ok = ok & mask.bool()[:, None, None]
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        x = self.n1(x + self.o((w @ v).transpose(1, 2).flatten(2)))
        return self.n2(x + self.down(F.gelu(self.up(x))))


class Redrawn(Encoder):
    def init_weights(self, m):
        if isinstance(m, nn.Linear):
            nn.init.normal_(m.weight, std=0.2)
            nn.init.zeros_(m.bias)
        elif isinstance(m, nn.Embedding):
            nn.init.normal_(m.weight, std=0.2)


def subject(cls):
    return Subject(kind="encoder", build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.d_ff),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask), mask_forms=("padding",),
                   declares={"causal": False, "padding_idx": PAD, "positions": "none", "norm": "layer", "stacked": False,
                             "norm_placement": "post", "activation": "gelu", "init": "other", "padding_side": "both"})


right, wrong = subject(Encoder), subject(Redrawn)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    for name, cls, zero in (("right", Encoder, True), ("wrong", Redrawn, False)):
        m, ids = cls(11, 16, 2, 32), torch.tensor([[3, 0, 5, 0]])
        start = m.emb.weight[PAD].detach().clone()
        x = m.emb.weight[ids]
        q, k, v = (p.view(1, 4, 2, 8).transpose(1, 2) for p in m.qkv(x).chunk(3, -1))
        y = m.n1(x + m.o(((q @ k.mT / 8 ** 0.5).softmax(-1) @ v).transpose(1, 2).reshape(1, 4, 16)))
        want = m.n2(y + m.down(F.gelu(m.up(y))))
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        out = m(ids)
        out[..., 0].sum().backward()
        opt.step()
        print(name, (out - want).abs().max().item(), "row of padding", start.abs().max().item())
        assert torch.allclose(out, want, atol=1e-5) and torch.equal(start, m.emb.weight[PAD])
        assert (start.abs().max().item() == 0) == zero
