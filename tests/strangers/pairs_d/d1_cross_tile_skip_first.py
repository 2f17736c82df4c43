import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("A tile of the memory is skipped as all padding if it is so in sample 0, not in every sample, so samples with a "
        "longer memory than the first of the batch lose the tail of theirs.")
PLACE = "skip test of the loop over memory tiles (memory_mask[0] for memory_mask)"
TILE = 4


class TiledCross(nn.Module):
    def __init__(self, d, heads, buggy=False):
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_o = (nn.Linear(d, d, bias=False) for _ in range(4))
        self.heads, self.buggy = heads, buggy

    def forward(self, x, memory, memory_mask=None):
        B, T, D = x.shape
        S = memory.shape[1]
        cut = lambda t: t.view(B, -1, self.heads, D // self.heads).transpose(1, 2)
        q, k, v = cut(self.to_q(x)) * (D // self.heads) ** -0.5, cut(self.to_k(memory)), cut(self.to_v(memory))
        real = torch.ones(B, S, dtype=torch.bool, device=x.device) if memory_mask is None else memory_mask.bool()
        top = q.new_full((B, self.heads, T, 1), -torch.inf)
        mass, acc = torch.zeros_like(top), torch.zeros_like(q)
        for j in range(0, S, TILE):
            here = real[:, j:j + TILE]
            if not (here[0] if self.buggy else here).any():
                continue
            s = (q @ k[:, :, j:j + TILE].transpose(-1, -2)).masked_fill(~here[:, None, None], -torch.inf)
            new = torch.maximum(top, s.detach().amax(-1, keepdim=True))
            ref = new.masked_fill(new == -torch.inf, 0.0)
            p, old = (s - ref).exp(), (top - ref).exp()
            mass, acc, top = mass * old + p.sum(-1, keepdim=True), acc * old + p @ v[:, :, j:j + TILE], new
        y = acc / mass.masked_fill(mass == 0, 1.0)
        return self.to_o(y.transpose(1, 2).reshape(B, T, D))


FACTS = {"bias": False, "positions": "none", "empty_row": "zeros"}
right = Subject(kind="cross_attention", build=lambda c: TiledCross(c.d_model, c.num_heads), declares=FACTS)
wrong = Subject(kind="cross_attention", build=lambda c: TiledCross(c.d_model, c.num_heads, True), declares=FACTS)

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = TiledCross(16, 2).double().eval(), TiledCross(16, 2, True).double().eval()
    b.load_state_dict(a.state_dict())
    x, mem = torch.randn(2, 5, 16, dtype=torch.float64), torch.randn(2, 10, 16, dtype=torch.float64)

    def naive(mask):
        q, k, v = (f(t).view(2, -1, 2, 8).transpose(1, 2) for f, t in ((a.to_q, x), (a.to_k, mem), (a.to_v, mem)))
        p = (q @ k.mT / 8 ** 0.5).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
        return a.to_o((p @ v).transpose(1, 2).reshape(2, 5, 16))

    far = []
    for lengths in ([10, 3], [3, 10]):
        mask = torch.arange(10) < torch.tensor(lengths)[:, None]
        far.append([(m(x, mem, mask) - naive(mask)).abs().amax((1, 2)).tolist() for m in (a, b)])
    print(far)
    assert max(far[0][0] + far[1][0]) < 1e-12 and max(far[0][1]) < 1e-12
    assert far[1][1][0] < 1e-12 and far[1][1][1] > 1e-2
