import torch
from torch import nn
from veriformer.properties import Subject

WHAT = ("The causal early exit over key tiles compares tile start with the query's row number without adding S - T, "
        "so with more keys than queries whole tiles of visible keys are never read.")
PLACE = "tile loop of the blocked attention, the `break` before the scores"
BLOCK = 4


class Blocked(nn.Module):
    def __init__(self, buggy=False):
        super().__init__()
        self.buggy = buggy

    def forward(self, q, k, v, attention_mask=None, causal=False):
        kind = q.dtype
        work = torch.float32 if kind in (torch.float16, torch.bfloat16) else kind
        q, k, v = q.to(work), k.to(work), v.to(work)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        T, S = q.shape[2], k.shape[2]
        shift = S - T
        rows = []
        for i in range(0, T, BLOCK):
            qi = q[:, :, i:i + BLOCK] * q.shape[-1] ** -0.5
            at = torch.arange(i, i + qi.shape[2], device=q.device)
            top = qi.new_full((*qi.shape[:3], 1), -torch.inf)
            total = torch.zeros_like(top)
            acc = qi.new_zeros(*qi.shape[:3], v.shape[-1])
            last = i + qi.shape[2] - 1 + (0 if self.buggy else shift)
            for j in range(0, S, BLOCK):
                if causal and j > last:
                    break
                keys = torch.arange(j, min(j + BLOCK, S), device=q.device)
                s = qi @ k[:, :, j:j + BLOCK].transpose(-1, -2)
                if causal:
                    s = s.masked_fill(keys > (at + shift)[:, None], -torch.inf)
                if attention_mask is not None:
                    s = s.masked_fill(~attention_mask.bool()[:, None, None, j:j + BLOCK], -torch.inf)
                new = torch.maximum(top, s.detach().amax(-1, keepdim=True))
                ref = torch.where(new == -torch.inf, torch.zeros_like(new), new)
                p, fade = (s - ref).exp(), (top - ref).exp()
                total = total * fade + p.sum(-1, keepdim=True)
                acc = acc * fade + p @ v[:, :, j:j + BLOCK]
                top = new
            rows.append(acc / torch.where(total == 0, torch.ones_like(total), total))
        return torch.cat(rows, 2).to(kind)


FACTS = {"causal_alignment": "bottom-right", "empty_row": "zeros", "grouped_queries": True}
right = Subject(kind="attention", build=lambda c: Blocked(), mask_forms=("padding",), declares=FACTS, name="blocked")
wrong = Subject(kind="attention", build=lambda c: Blocked(True), mask_forms=("padding",), declares=FACTS, name="blocked")

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    worst = {}
    for T, S in ((9, 9), (3, 13)):
        q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, T), (2, S), (2, S)))
        kk, vv = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        see = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        naive = (q @ kk.mT / 8 ** 0.5).masked_fill(~see, -torch.inf).softmax(-1) @ vv
        worst[T, S] = [(Blocked(b)(q, k, v, causal=True) - naive).abs().max().item() for b in (False, True)]
    print(worst)
    assert worst[9, 9][0] < 1e-12 and worst[3, 13][0] < 1e-12
    assert worst[9, 9][1] < 1e-12 and worst[3, 13][1] > 1e-2
