import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("On the unpadded path the sample that owns a packed token is found by bucketize without right=True, so the first "
        "token of every sample but the first is given to the sample before it: samples mix, and it loses its own.")
PLACE = "owners of packed tokens (cumulative lengths), the masked path only"


class Packed(nn.Module):
    def __init__(self, d, heads, buggy=False):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.heads, self.buggy = heads, buggy

    def heads_of(self, x):
        return (f(x).unflatten(-1, (self.heads, -1)).transpose(-2, -3) for f in (self.q, self.k, self.v))

    def forward(self, x, attention_mask=None):
        scale = (x.shape[-1] // self.heads) ** -0.5
        if attention_mask is None:
            q, k, v = self.heads_of(x)
            return self.o(((q @ k.transpose(-1, -2) * scale).softmax(-1) @ v).transpose(1, 2).flatten(2))
        mask = attention_mask.bool()
        where = mask.flatten().nonzero().squeeze(1)
        flat = x.flatten(0, 1)
        q, k, v = self.heads_of(flat[where])  # [H, N, d]
        ends = mask.sum(1).cumsum(0)
        owner = torch.bucketize(torch.arange(len(where), device=x.device), ends, right=not self.buggy)
        s = (q @ k.transpose(-1, -2) * scale).masked_fill(owner[:, None] != owner, -torch.inf)
        y = (s.softmax(-1) @ v).transpose(0, 1).flatten(1)
        return self.o(torch.zeros_like(flat).index_copy(0, where, y.to(flat.dtype)).view_as(x))


def subject(buggy):
    return Subject(kind="self_attention", build=lambda c: Packed(c.d_model, c.num_heads, buggy), mask_forms=("padding",),
                   projections=lambda m: {n: getattr(m, n).weight for n in "qkvo"}, name="packed",
                   declares={"causal": False, "positions": "none", "bias": False, "empty_row": "zeros"})


right, wrong = subject(False), subject(True)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = Packed(16, 2).double().eval(), Packed(16, 2, True).double().eval()
    b.load_state_dict(a.state_dict())
    x = torch.randn(3, 6, 16, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([[4], [6], [2]])
    q, k, v = (f(x).view(3, 6, 2, 8).transpose(1, 2) for f in (a.q, a.k, a.v))
    s = (q @ k.mT / 8 ** 0.5).masked_fill(~mask[:, None, None], -torch.inf)
    naive = a.o((s.softmax(-1) @ v).transpose(1, 2).reshape(3, 6, 16))
    far = [((m(x, mask) - naive)[mask].abs().max().item(), (m(x[:1], mask[:1]) - naive[:1])[mask[:1]].abs().max().item())
           for m in (a, b)]
    print(far, "(batch, first sample alone)")
    assert max(far[0]) < 1e-12 and far[1][0] > 1e-2 and far[1][1] < 1e-12
