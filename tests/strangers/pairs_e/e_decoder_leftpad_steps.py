"""Decoder with learned positions that are counted from the first real token; greedy generation with a cache."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "Cached steps take the cache's length for the position, whereas the prompt counts real tokens, so left-padded samples jump ahead."
PLACE = "position ids of cached steps"


class Decoder(nn.Module):
    def __init__(self, vocab, d, h, max_len):
        super().__init__()
        self.h, self.tok, self.pos = h, nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.qkv, self.out, self.head = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, vocab)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def position(self, mask, start, stop):
        return (mask.long().cumsum(1) - 1).clamp(min=0)[:, start:stop]

    def step(self, ids, mask, past):
        start = 0 if past is None else past[0].shape[2]
        stop = start + ids.shape[1]
        x = self.tok(ids) + self.pos(self.position(mask[:, :stop], start, stop))
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.h, -1)).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        ok = torch.ones(ids.shape[1], stop, dtype=torch.bool, device=x.device).tril(start) & mask[:, None, None, :stop]
        s = q @ k.mT / q.shape[-1] ** 0.5
        w = s.masked_fill(~ok, torch.finfo(s.dtype).min).softmax(-1).masked_fill(~ok, 0.0)
        return self.head(self.n2(x + self.out((w @ v).transpose(1, 2).flatten(2)))), (k, v)

    def forward(self, ids, mask=None):
        return self.step(ids, torch.ones_like(ids).bool() if mask is None else mask.bool(), None)[0]

    def cached(self, chunks, mask=None, reorder=None):
        mask = torch.ones_like(torch.cat(list(chunks), 1)) if mask is None else mask
        mask, past, outs = mask.bool(), None, []
        for n, ids in enumerate(chunks):
            if n == 1 and reorder is not None:
                mask, past = mask[reorder], tuple(z[reorder] for z in past)
            y, past = self.step(ids, mask, past)
            outs.append(y)
        return torch.cat(outs, 1)


class ByLength(Decoder):
    def position(self, mask, start, stop):
        return torch.arange(start, stop, device=mask.device)[None] if start else super().position(mask, start, stop)


def subject(cls):
    return Subject(kind="decoder", build=lambda c: cls(c.vocab_size, c.d_model, c.num_heads, c.max_len),
                   forward=lambda m, tokens, attention_mask=None: m(tokens, attention_mask), mask_forms=("padding",),
                   cache=lambda m, chunks, attention_mask=None, reorder=None: m.cached(chunks, attention_mask, reorder),
                   declares={"causal": True, "positions": "learned", "padding_side": "both", "stacked": False,
                             "tied": False, "norm_placement": "pre", "final_norm": True})


right, wrong = subject(Decoder), subject(ByLength)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = Decoder(11, 16, 2, 12), ByLength(11, 16, 2, 12)
    z.load_state_dict(a.state_dict())
    ids = torch.randint(0, 11, (1, 7))
    u = a.tok(ids) + a.pos.weight[:7]
    q, k, v = (p.view(1, 7, 2, 8).transpose(1, 2) for p in a.qkv(a.n1(u)).chunk(3, -1))
    s = (q @ k.mT / 8 ** 0.5 + torch.full((7, 7), float("-inf")).triu(1)).softmax(-1)
    want = a.head(a.n2(u + a.out((s @ v).transpose(1, 2).reshape(1, 7, 16))))
    for pads in (0, 2):
        row, mask = torch.cat([torch.zeros(1, pads).long(), ids], 1), torch.arange(7 + pads)[None] >= pads
        dr, dw = ((m.cached(row.split((4 + pads, 1, 2), 1), mask)[:, pads:] - want).abs().max().item() for m in (a, z))
        print(pads, "left pads", (a(row, mask)[:, pads:] - want).abs().max().item(), dr, dw)
        assert torch.allclose(a(row, mask)[:, pads:], want, atol=1e-5) and dr < 1e-5 and (dw > 1e-2) == (pads > 0)
