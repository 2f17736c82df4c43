WHAT = "attention kernel that multiplies exponentials by the values first and divides by their sum last, the sum being one more column of the values; softmax base 2; value width differs from key width"
import math

import torch


def attend(q, k, v, mask, causal):
    T, S, K = q.shape[-2], k.shape[-2], q.shape[-1]
    wide = torch.promote_types(q.dtype, torch.float32)
    s = torch.matmul(q.to(wide) * (math.log2(math.e) / math.sqrt(K)), k.to(wide).transpose(-1, -2))
    if causal:  # top-left
        ahead = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1)
        s = torch.where(ahead, -math.inf, s)
    if mask is not None:
        s = torch.where(mask, s, -math.inf)
    best = s.detach().amax(-1, keepdim=True)
    p = torch.exp2(s - best.masked_fill(best == -math.inf, 0.0))
    ones = torch.cat([v.to(wide), v.new_ones(*v.shape[:-1], 1, dtype=wide)], -1)
    mixed, total = (p @ ones).split([v.shape[-1], 1], -1)
    return (mixed / total.masked_fill(total == 0, 1.0)).to(v.dtype)


from veriformer.properties import Subject


def padding(model, q, k, v, attention_mask=None, causal=False):
    return attend(q, k, v, None if attention_mask is None else attention_mask[:, None, None], causal)


def pairwise(model, q, k, v, attention_mask=None, causal=False):
    if attention_mask is not None and attention_mask.ndim == 3:
        attention_mask = attention_mask[:, None]
    return attend(q, k, v, attention_mask, causal)


undeclared = Subject(kind="attention", forward=padding)
declared = Subject(
    kind="attention", name="deferred division", forward=pairwise, mask_forms=("pairwise",),
    declares={"empty_row": "zeros", "causal_alignment": "top-left", "grouped_queries": False},
)
