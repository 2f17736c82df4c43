import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("With a cache the causal mask of a chunk of several tokens is tril() instead of tril(S - T), so in chunked "
        "prefill later chunks see only the first keys of the cache; one-token steps skip the mask and are right.")
PLACE = "causal mask in the cached forward, its diagonal"


class Cached(nn.Module):
    def __init__(self, d, heads, buggy=False):
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.heads, self.buggy = heads, buggy

    def forward(self, x, attention_mask=None, past=None):
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if past is not None:
            if past:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            past[:] = [k, v]
        S = k.shape[2]
        s = q @ k.transpose(-1, -2) * (D // self.heads) ** -0.5
        if T > 1:
            see = torch.ones(T, S, dtype=torch.bool, device=x.device).tril(0 if self.buggy else S - T)
            s = s.masked_fill(~see, torch.finfo(s.dtype).min)
        if attention_mask is not None:
            s = s.masked_fill(~attention_mask.bool()[:, None, None, :S], torch.finfo(s.dtype).min)
        return self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(B, T, D))


def by_chunks(model, chunks, attention_mask=None):
    past = []
    return torch.cat([model(c, attention_mask, past) for c in chunks], 1)


def subject(buggy):
    return Subject(kind="self_attention", build=lambda c: Cached(c.d_model, c.num_heads, buggy), cache=by_chunks,
                   forward=lambda m, x, attention_mask=None: m(x, attention_mask), mask_forms=("padding",),
                   declares={"causal": True, "positions": "none", "bias": True, "padding_side": "right"}, name="cached")


right, wrong = subject(False), subject(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = Cached(16, 2).double().eval(), Cached(16, 2, True).double().eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 9, 16, dtype=torch.float64)
    q, k, v = (t.view(2, 9, 2, 8).transpose(1, 2) for t in a.qkv(x).chunk(3, -1))
    s = (q @ k.mT / 8 ** 0.5).masked_fill(torch.ones(9, 9, dtype=torch.bool).triu(1), -torch.inf)
    naive = a.out((s.softmax(-1) @ v).transpose(1, 2).reshape(2, 9, 16))
    far = lambda y: (y - naive).abs().max().item()
    steps, blocks = [5, 1, 1, 1, 1], [4, 3, 2]
    got = [[far(m(x)), far(by_chunks(m, x.split(steps, 1))), far(by_chunks(m, x.split(blocks, 1)))] for m in (a, b)]
    print(got)
    assert max(got[0]) < 1e-12 and max(got[1][:2]) < 1e-12 and got[1][2] > 1e-2
