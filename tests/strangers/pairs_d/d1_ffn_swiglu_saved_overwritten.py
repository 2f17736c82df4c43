import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from veriformer.properties import Subject

WHAT = ("The fused SwiGLU applies silu in place to the gate and then saves that buffer, which the backward takes for the "
        "pre-activation: the output is right, the gradients of gate and up projection and of the input are not.")
PLACE = "forward of the fused silu-multiply Function, F.silu(gate, inplace=True) before save_for_backward"


class SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up, thrifty):
        act = F.silu(gate, inplace=thrifty)
        ctx.save_for_backward(gate, up)
        return act * up

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        gate, up = ctx.saved_tensors
        sig = torch.sigmoid(gate)
        silu = gate * sig
        return dy * up * (sig + silu * (1 - sig)), dy * silu, None


class SwiGLU(nn.Module):
    def __init__(self, d, d_ff, thrifty=False):
        super().__init__()
        self.w_gate, self.w_up = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.w_down = nn.Linear(d_ff, d, bias=False)
        self.thrifty = thrifty

    def forward(self, x):
        return self.w_down(SiluMul.apply(self.w_gate(x), self.w_up(x), self.thrifty))


FACTS = {"activation": "swiglu", "bias": False, "once_differentiable": True}
right = Subject(kind="feed_forward", build=lambda c: SwiGLU(c.d_model, c.d_ff), declares=FACTS, name="swiglu")
wrong = Subject(kind="feed_forward", build=lambda c: SwiGLU(c.d_model, c.d_ff, True), declares=FACTS, name="swiglu")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    a, b = SwiGLU(16, 24).double(), SwiGLU(16, 24, True).double()
    b.load_state_dict(a.state_dict())
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    g = x @ a.w_gate.weight.T
    naive = (g / (1 + (-g).exp()) * (x @ a.w_up.weight.T)) @ a.w_down.weight.T
    seed = torch.randn_like(naive)
    want = torch.autograd.grad(naive, [x, *a.parameters()], seed)
    rows = []
    for m in (a, b):
        y = m(x)
        got = torch.autograd.grad(y, [x, *m.parameters()], seed)
        rows.append([(y - naive).abs().max().item()] + [(s - t).abs().max().item() for s, t in zip(got, want)])
    print(rows, "(output, x, gate, up, down)")
    assert max(rows[0]) < 1e-12
    assert rows[1][0] < 1e-12 and min(rows[1][1:4]) > 1e-2 and rows[1][4] < 1e-12
