"""Graph transformer attention on an edge list (gather, scatter), the adjacency given as a pairwise mask."""
import torch
from torch import nn

from veriformer.properties import Subject


def segment_softmax(logits, index, num_segments):
    """Softmax of logits [E, H] within each group of equal `index` [E]."""
    where = index.unsqueeze(-1).expand_as(logits)
    peak = torch.full((num_segments, logits.shape[1]), -torch.inf, dtype=logits.dtype, device=logits.device)
    peak = peak.scatter_reduce(0, where, logits.detach(), "amax")
    weight = (logits - peak.gather(0, where)).exp()
    total = torch.zeros_like(peak, dtype=weight.dtype).scatter_add(0, where, weight)
    return weight / total.gather(0, where)


class EdgeAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.to_q = nn.Linear(dim, dim)
        self.to_k = nn.Linear(dim, dim)
        self.to_v = nn.Linear(dim, dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, adjacency=None):
        B, N, D = x.shape
        if adjacency is None:
            adjacency = torch.ones(B, N, N, dtype=torch.bool, device=x.device)
        graph, i, j = adjacency.expand(B, N, N).nonzero(as_tuple=True)
        dst, src = graph * N + i, graph * N + j  # messages flow from src (the key) to dst (the query)
        q, k, v = (f(x).reshape(B * N, self.heads, self.width) for f in (self.to_q, self.to_k, self.to_v))
        logits = (q[dst] * k[src]).sum(-1) / self.width**0.5
        alpha = segment_softmax(logits, dst, B * N)
        messages = alpha.unsqueeze(-1) * v[src]
        out = torch.zeros(B * N, self.heads, self.width, dtype=messages.dtype, device=x.device)
        out = out.index_add(0, dst, messages)
        return self.to_out(out.view(B, N, D))


subject = Subject(
    kind="self_attention",
    build=lambda c: EdgeAttention(c.d_model, c.num_heads),
    forward=lambda m, x, attention_mask=None: m(x, attention_mask),
    mask_forms=("pairwise",),
    declares={"causal": False, "positions": "none"},
)
