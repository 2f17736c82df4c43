"""Encoder that sorts a batch by length, cuts each group to its longest sample, and restores the order."""
import torch
from torch import nn
import torch.nn.functional as F
from veriformer.properties import Subject

WHAT = "The batch's order is restored with the sorting permutation itself, not its inverse; the two agree for batches of one or two."
PLACE = "undoing the sort by length"


def inverse(order):
    return order.argsort()


def itself(order):
    return order


class Encoder(nn.Module):
    def __init__(self, vocab, d, h, layers, restore):
        super().__init__()
        self.h, self.restore, self.emb = h, restore, nn.Embedding(vocab, d)
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(d) for _ in range(layers))

    def encode(self, ids, mask):
        x, hide = self.emb(ids), ~mask[:, None, None]
        for f, o, n in zip(self.qkv, self.out, self.norm):
            q, k, v = f(x).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
            s = q @ k.mT * q.shape[-1] ** -0.5
            w = s.masked_fill(hide, torch.finfo(s.dtype).min).softmax(-1).masked_fill(hide, 0.0)
            x = n(x + o((w @ v).transpose(1, 2).flatten(2)))
        return x

    def forward(self, ids, mask=None):
        if mask is None:
            return self.encode(ids, torch.ones_like(ids).bool())
        mask, t = mask.bool(), ids.shape[1]
        last = (mask * torch.arange(1, t + 1, device=ids.device)).amax(1)  # one past the last real token
        order = last.argsort(descending=True, stable=True)
        parts = []
        for rows in order.split(2):
            n = max(1, int(last[rows].max()))
            parts.append(F.pad(self.encode(ids[rows, :n], mask[rows, :n]), (0, 0, 0, t - n)))
        return torch.cat(parts)[self.restore(order)]


def subject(restore):
    return Subject(kind="encoder", mask_forms=("padding",),
                   build=lambda c: Encoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, restore),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask),
                   declares={"causal": False, "positions": "none", "norm": "layer", "norm_placement": "post",
                             "structure": "other", "padding_side": "both"})


right, wrong = subject(inverse), subject(itself)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Encoder(11, 16, 2, 1, inverse), Encoder(11, 16, 2, 1, itself)
    z.load_state_dict(a.state_dict())
    for lens, clash in (((2, 5), False), ((3, 5, 1), False), ((2, 3, 5), False), ((3, 1, 5), True)):
        ids = torch.randint(0, 11, (len(lens), 5))
        mask = torch.arange(5) < torch.tensor(lens)[:, None]
        dr = dw = 0
        for i, n in enumerate(lens):
            x = a.emb(ids[i:i + 1, :n])
            q, k, v = (p.view(1, n, 2, 8).transpose(1, 2) for p in a.qkv[0](x).chunk(3, -1))
            want = a.norm[0](x + a.out[0](((q @ k.mT / 8 ** 0.5).softmax(-1) @ v).transpose(1, 2).reshape(1, n, 16)))[0]
            dr, dw = (max(d, (m(ids, mask)[i, :n] - want).abs().max().item()) for d, m in ((dr, a), (dw, z)))
        print(lens, dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
