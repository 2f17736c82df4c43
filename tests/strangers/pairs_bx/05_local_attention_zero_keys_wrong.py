WHAT = 'the zero keys that stand before the first chunk are not masked (`kpos >= 0` is missing from `allowed`), so queries of the first chunk give weight to keys that do not exist'
import torch
from torch import einsum, nn
import torch.nn.functional as F

from veriformer.properties import Subject

WINDOW = 4


class LocalAttention(nn.Module):
    """Causal sliding window by chunks: every chunk of queries looks at its own keys and at those of the chunk before."""

    def __init__(self, dim, heads, window=WINDOW):
        super().__init__()
        self.heads, self.window = heads, window
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x):
        b, t, d = x.shape
        w, h = self.window, self.heads
        x = F.pad(x, (0, 0, 0, -t % w))
        n = x.shape[1] // w
        q, k, v = (z.reshape(b, n, w, h, d // h) for z in self.to_qkv(x).chunk(3, dim=-1))

        def with_previous(z):
            return torch.cat([F.pad(z, (0, 0, 0, 0, 0, 0, 1, 0))[:, :-1], z], dim=2)

        k, v = with_previous(k), with_previous(v)
        sim = einsum("bnihd,bnjhd->bnhij", q, k) * (d // h) ** -0.5

        chunk = torch.arange(n, device=x.device)[:, None] * w
        qpos = (chunk + torch.arange(w, device=x.device))[:, :, None]
        kpos = (chunk - w + torch.arange(2 * w, device=x.device))[:, None, :]
        allowed = (kpos <= qpos) & (qpos - kpos < w)
        sim = sim.masked_fill(~allowed[None, :, None], -torch.finfo(sim.dtype).max)
        out = einsum("bnhij,bnjhd->bnihd", sim.softmax(dim=-1), v)
        return self.to_out(out.reshape(b, n * w, d)[:, :t])


subject = Subject(
    kind="self_attention",
    name="local attention by chunks",
    build=lambda c: LocalAttention(c.d_model, c.num_heads),
    forward=lambda m, x: m(x),
    declares={"causal": True, "window": WINDOW, "positions": "none"},
)
