import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("The running maximum of the online softmax starts at 0 instead of -inf, so a row whose scores all lie far below 0 "
        "underflows: its sum is 0 and its output is zeros instead of a weighted mean of the values.")
PLACE = "initial value of the running maximum, before the loop over key tiles"
TILE = 4


class Online(nn.Module):
    def __init__(self, buggy=False):
        super().__init__()
        self.start = 0.0 if buggy else -torch.inf

    def forward(self, q, k, v, attention_mask=None, causal=False):
        kind = q.dtype
        work = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
        q, k, v = (t.to(work) for t in (q, k, v))
        g = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(g, 1), v.repeat_interleave(g, 1)
        T, S = q.shape[2], k.shape[2]
        m = q.new_full((*q.shape[:3], 1), self.start)
        l = torch.zeros_like(m)
        o = q.new_zeros(*q.shape[:3], v.shape[-1])
        for j in range(0, S, TILE):
            s = (q * q.shape[-1] ** -0.5) @ k[:, :, j:j + TILE].transpose(-1, -2)
            if causal:
                cols = torch.arange(j, j + s.shape[-1], device=q.device)
                s = s.masked_fill(cols > torch.arange(S - T, S, device=q.device)[:, None], -torch.inf)
            if attention_mask is not None:
                s = s.masked_fill(~attention_mask.bool()[:, None, None, j:j + TILE], -torch.inf)
            m_new = torch.maximum(m, s.detach().amax(-1, keepdim=True))
            base = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = torch.exp(s - base)
            decay = torch.exp(m - base)
            l = l * decay + p.sum(-1, keepdim=True)
            o = o * decay + p @ v[:, :, j:j + TILE]
            m = m_new
        return (o / l.masked_fill(l == 0, 1.0)).to(kind)


FACTS = {"causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True}
right = Subject(kind="attention", build=lambda c: Online(), mask_forms=("padding",), declares=FACTS, name="online")
wrong = Subject(kind="attention", build=lambda c: Online(True), mask_forms=("padding",), declares=FACTS, name="online")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    err = {}
    for far in (0.0, 30.0):
        q, k, v = (torch.randn(2, 2, 6, 8) for _ in range(3))
        q[..., 0], k[..., 0] = far, -far
        naive = (q @ k.mT / 8 ** 0.5).softmax(-1) @ v
        err[far] = [(Online(b)(q, k, v) - naive).abs().max().item() for b in (False, True)]
    print(err)
    assert err[0.0][0] < 1e-5 and err[30.0][0] < 1e-4 and err[0.0][1] < 1e-5 and err[30.0][1] > 0.1
