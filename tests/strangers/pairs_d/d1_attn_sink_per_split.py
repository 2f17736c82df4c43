import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("With the keys in several splits the learned sink is added to every split's partial sum instead of once in the "
        "merge, so the sink counts ceil(S / 4) times in the denominator.")
PLACE = "partial softmax of a split (flash-decoding), the sink term"
SPLIT = 4


class SplitSink(nn.Module):
    def __init__(self, heads, buggy=False):
        super().__init__()
        self.sink = nn.Parameter(torch.randn(heads))
        self.buggy = buggy

    def forward(self, q, k, v, attention_mask=None, causal=False):
        kind = q.dtype
        work = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
        q, k, v = q.to(work) * q.shape[-1] ** -0.5, k.to(work), v.to(work)
        n, T, S = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        sink = self.sink.to(work)[None, :, None, None]
        parts = []
        for a in range(0, S, SPLIT):
            s = q @ k[:, :, a:a + SPLIT].transpose(-1, -2)
            if causal:
                ahead = torch.arange(a, a + s.shape[-1])[None] > torch.arange(T)[:, None] + S - T
                s = s.masked_fill(ahead.to(s.device), -torch.inf)
            if attention_mask is not None:
                s = s.masked_fill(~attention_mask.bool()[:, None, None, a:a + SPLIT], -torch.inf)
            top = torch.maximum(s.amax(-1, keepdim=True), sink).detach()
            e = (s - top).exp()
            total = e.sum(-1, keepdim=True)
            if self.buggy:
                total = total + (sink - top).exp()
            parts.append((top, total, e @ v[:, :, a:a + SPLIT]))
        top = torch.stack([p[0] for p in parts]).amax(0)
        total = sum(t * (m - top).exp() for m, t, _ in parts)
        if not self.buggy:
            total = total + (sink - top).exp()
        return (sum(o * (m - top).exp() for m, _, o in parts) / total).to(kind)


FACTS = {"sink": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True}
right = Subject(kind="attention", build=lambda c: SplitSink(c.num_heads), mask_forms=("padding",), declares=FACTS)
wrong = Subject(kind="attention", build=lambda c: SplitSink(c.num_heads, True), mask_forms=("padding",), declares=FACTS)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    good, bad = SplitSink(4).double(), SplitSink(4, True).double()
    bad.load_state_dict(good.state_dict())
    err = {}
    for S in (4, 11):
        q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 3), (2, S), (2, S)))
        s = (q @ k.repeat_interleave(2, 1).mT / 8 ** 0.5)
        s = torch.cat([s, good.sink[None, :, None, None].expand(2, 4, 3, 1)], -1)
        naive = s.softmax(-1)[..., :-1] @ v.repeat_interleave(2, 1)
        err[S] = [(m(q, k, v) - naive).abs().max().item() for m in (good, bad)]
    print(err)
    assert err[4][0] < 1e-12 and err[11][0] < 1e-12 and err[4][1] < 1e-12 and err[11][1] > 1e-2
