import torch
import torch.nn.functional as F
from torch import nn
from veriformer.properties import Subject

WHAT = ("Chunked sliding-window attention puts a chunk of zero keys before the first one and, where no mask is given, "
        "does not exclude it (key position >= 0), so the first W - 1 outputs are diluted by phantom keys of score 0.")
PLACE = "validity of keys in the chunked window, the case attention_mask=None"
W = 4


class Local(nn.Module):
    def __init__(self, d, heads, buggy=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.heads, self.buggy = heads, buggy

    def forward(self, x, attention_mask=None):
        B, T, D = x.shape
        N = -(-T // W)
        tail = N * W - T
        q, k, v = (f(x).view(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        q = F.pad(q, (0, 0, 0, tail)).unflatten(2, (N, W))
        k, v = (F.pad(t, (0, 0, W, tail)).unflatten(2, (N + 1, W)) for t in (k, v))
        k, v = (torch.cat([t[:, :, :-1], t[:, :, 1:]], 3) for t in (k, v))  # [B,H,N,2W,d]
        row, col = torch.arange(W, device=x.device) + W, torch.arange(2 * W, device=x.device)
        gap = row[:, None] - col
        see = ((gap >= 0) & (gap < W))[None, None, None]
        if attention_mask is None and not self.buggy:
            attention_mask = torch.ones(B, T, dtype=torch.bool, device=x.device)
        if attention_mask is not None:
            m = F.pad(attention_mask.bool(), (W, tail), value=False).unflatten(1, (N + 1, W))
            see = see & torch.cat([m[:, :-1], m[:, 1:]], 2)[:, None, :, None]
        s = (q @ k.transpose(-1, -2) * (D // self.heads) ** -0.5).masked_fill(~see, torch.finfo(x.dtype).min)
        p = s.softmax(-1).masked_fill(~see, 0.0)
        y = (p @ v).flatten(2, 3)[:, :, :T].transpose(1, 2).reshape(B, T, D)
        return self.o(y)


FACTS = {"causal": True, "window": W, "positions": "none", "bias": False, "empty_row": "zeros"}
right = Subject(kind="self_attention", build=lambda c: Local(c.d_model, c.num_heads), mask_forms=("padding",),
                declares=FACTS, name="local")
wrong = Subject(kind="self_attention", build=lambda c: Local(c.d_model, c.num_heads, True), mask_forms=("padding",),
                declares=FACTS, name="local")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = Local(16, 2).double().eval(), Local(16, 2, True).double().eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 11, 16, dtype=torch.float64)
    q, k, v = (f(x).view(2, 11, 2, 8).transpose(1, 2) for f in (a.q, a.k, a.v))
    gap = torch.arange(11)[:, None] - torch.arange(11)
    naive = (q @ k.mT / 8 ** 0.5).masked_fill((gap < 0) | (gap >= W), -torch.inf).softmax(-1) @ v
    naive = a.o(naive.transpose(1, 2).reshape(2, 11, 16))
    ones = torch.ones(2, 11, dtype=torch.bool)
    d = [(y - naive).abs().amax((0, 2)) for y in (a(x), b(x), b(x, ones))]
    print([t.tolist() for t in d])
    assert d[0].max() < 1e-12 and d[1][:W - 1].min() > 1e-3 and d[1][W - 1:].max() < 1e-12 and d[2].max() < 1e-12
