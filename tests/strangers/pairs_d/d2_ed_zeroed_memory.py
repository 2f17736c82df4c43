from types import SimpleNamespace
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("cross-attention gets no padding mask because the encoder's output was set to zero at padding, but a zero row still "
        "takes its share exp(q.bias) of the softmax, so the answer is diluted with every padded source token")
PLACE = "Copier.forward: memory zeroed instead of memory_key_padding_mask"


class Copier(nn.Module):
    def __init__(self, c, zero):
        super().__init__()
        self.zero = zero
        d, h, ff = c.d_model, c.num_heads, c.d_ff
        self.es, self.et = nn.Embedding(c.vocab_size, d), nn.Embedding(c.vocab_size, d)
        self.pos = nn.Embedding(c.max_len, d)
        self.enc = nn.ModuleList(nn.TransformerEncoderLayer(d, h, ff, 0.0, batch_first=True, norm_first=True)
                                 for _ in range(c.num_layers))
        self.dec = nn.ModuleList(nn.TransformerDecoderLayer(d, h, ff, 0.0, batch_first=True, norm_first=True)
                                 for _ in range(c.num_layers))
        self.head = nn.Linear(d, c.vocab_size)

    def forward(self, source, target, source_mask=None, target_mask=None):
        s_pad = None if source_mask is None else ~source_mask.bool()
        t_pad = None if target_mask is None else ~target_mask.bool()
        m = self.es(source) + self.pos.weight[: source.size(1)]
        for layer in self.enc:
            m = layer(m, src_key_padding_mask=s_pad)
        if self.zero and s_pad is not None:
            m, s_pad = m.masked_fill(s_pad[..., None], 0.0), None
        t = target.size(1)
        later = torch.ones(t, t, dtype=torch.bool).triu(1)
        y = self.et(target) + self.pos.weight[:t]
        for layer in self.dec:
            y = layer(y, m, tgt_mask=later, tgt_key_padding_mask=t_pad, memory_key_padding_mask=s_pad)
        return self.head(y)


def _make(zero):
    return Subject(kind="encoder_decoder", build=lambda c: Copier(c, zero),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "learned", "norm": "layer", "norm_placement": "pre", "final_norm": False,
                             "activation": "relu", "padding_side": "right"})


right, wrong = _make(False), _make(True)

if __name__ == "__main__":
    torch.set_num_threads(1); torch.manual_seed(0)
    c = SimpleNamespace(d_model=16, num_heads=2, num_layers=2, d_ff=32, vocab_size=11, max_len=16)
    a, b = right.build(c).eval(), wrong.build(c).eval(); b.load_state_dict(a.state_dict())
    s, t = torch.randint(0, 11, (1, 7)), torch.randint(0, 11, (1, 5))
    A = a.dec[0].multihead_attn                                  # naive: one head and one query at a time
    x, mem = torch.randn(1, 3, 16), torch.randn(1, 7, 16); out = torch.zeros(3, 16)
    q, k, v = (z @ w.T for z, w in zip((x[0], mem[0, :4], mem[0, :4]), A.in_proj_weight.chunk(3)))
    for h in (0, 8):
        for i in range(3):
            out[i, h:h + 8] = (q[i, h:h + 8] @ k[:, h:h + 8].T / 8 ** .5).softmax(-1) @ v[:, h:h + 8]
    pad = torch.tensor([[False] * 4 + [True] * 3])
    assert torch.allclose(A(x, mem, mem, key_padding_mask=pad)[0][0], A.out_proj(out), atol=1e-5)
    assert not torch.allclose(A(x, *[mem.masked_fill(pad[..., None], 0.0)] * 2)[0][0], A.out_proj(out), atol=1e-3)
    for n in (7, 6, 4):
        m = (torch.arange(7) < n)[None]
        e = [(net(s, t, m) - a(s[:, :n], t)).abs().max().item() for net in (a, b)]
        print(7 - n, "padded: right", e[0], "wrong", e[1])
        assert e[0] < 1e-4 and (e[1] > 1e-3) == (n < 7)
