import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("In half precision the raw product q k^T is formed unscaled in float16 and only its result is cast to float32 "
        "and scaled, so it overflows to inf (and NaN after the softmax) where the scaled score would still be finite.")
PLACE = "score computation, the upcast stands behind the matrix product"


class Upcasting(nn.Module):
    """Softmax attention whose scores are float32 for half-precision inputs."""

    def __init__(self, buggy=False):
        super().__init__()
        self.buggy = buggy

    def forward(self, q, k, v, attention_mask=None, causal=False):
        n, T, S = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
        k, v = k.repeat_interleave(n, 1), v.repeat_interleave(n, 1)
        wide = torch.promote_types(q.dtype, torch.float32)
        factor = q.shape[-1] ** -0.5
        if self.buggy:
            s = torch.matmul(q, k.transpose(-1, -2)).to(wide) * factor
        else:
            s = torch.matmul(q.to(wide) * factor, k.to(wide).transpose(-1, -2))
        see = torch.ones(1, 1, T, S, dtype=torch.bool, device=q.device)
        if causal:
            see = see.tril(S - T)
        if attention_mask is not None:
            see = see & attention_mask.bool()[:, None, None]
        p = s.masked_fill(~see, torch.finfo(wide).min).softmax(-1).masked_fill(~see, 0.0)
        return (p @ v.to(wide)).to(v.dtype)


FACTS = {"half_precision": True, "causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True}
right = Subject(kind="attention", build=lambda c: Upcasting(), mask_forms=("padding",), declares=FACTS, name="upcasting")
wrong = Subject(kind="attention", build=lambda c: Upcasting(True), mask_forms=("padding",), declares=FACTS,
                name="upcasting")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    err = {}
    for size in (1.0, 60.0):
        q, k, v = (torch.randn(2, 2, 6, 32) for _ in range(3))
        q, k = q.sign() * size, (q + 0.2 * k).sign() * size
        q, k, v = q.half(), k.half(), v.half()
        naive = (q.double() @ k.double().mT / 32 ** 0.5).softmax(-1) @ v.double()
        err[size] = [(Upcasting(b)(q, k, v).double() - naive).abs().max().item() for b in (False, True)]
    print(err)
    assert err[1.0][0] < 5e-3 and err[60.0][0] < 5e-3 and err[1.0][1] < 5e-3
    assert not err[60.0][1] < 1e-1  # NaN
