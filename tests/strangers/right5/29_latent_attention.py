WHAT = "multi-head latent attention: queries and keys come through low-rank latents with norms, 2 rotary channels apart from the others and shared by all heads' keys; keys are absorbed into the queries, never made"
import torch
from torch import nn

ROT = 2


class MLA(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        K = d // h
        self.h, self.plain, self.K, rank = h, K - ROT, K, max(2, d // 2)
        self.q_down, self.q_norm, self.q_up = nn.Linear(d, rank, bias=False), nn.RMSNorm(rank, eps=1e-6), nn.Linear(rank, h * K, bias=False)
        self.kv_down, self.kv_norm = nn.Linear(d, rank + ROT, bias=False), nn.RMSNorm(rank, eps=1e-6)
        self.k_up = nn.Parameter(torch.randn(h, self.plain, rank) * rank**-0.5) if self.plain else None
        self.v_up = nn.Parameter(torch.randn(h, K, rank) * rank**-0.5)
        self.o = nn.Linear(h * K, d, bias=False)

    @staticmethod
    def rotate(x, at):
        c, s = at.cos().to(x.dtype), at.sin().to(x.dtype)
        return torch.stack([x[..., 0] * c - x[..., 1] * s, x[..., 0] * s + x[..., 1] * c], -1)

    def forward(self, x, mask=None):
        B, T, D = x.shape
        at = torch.arange(T, device=x.device, dtype=torch.float64)
        q = self.q_up(self.q_norm(self.q_down(x))).view(B, T, self.h, self.K).transpose(1, 2)
        latent, k_rot = self.kv_down(x).split([self.kv_down.out_features - ROT, ROT], -1)
        latent, k_rot = self.kv_norm(latent), self.rotate(k_rot, at)
        s = torch.einsum("bhtn,bsn->bhts", self.rotate(q[..., self.plain :], at), k_rot)
        if self.k_up is not None:  # heads of 2 channels turn them all
            q_latent = torch.einsum("bhtn,hnr->bhtr", q[..., : self.plain], self.k_up)
            s = s + torch.einsum("bhtr,bsr->bhts", q_latent, latent)
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
        if mask is not None:
            seen = seen & mask[:, None, None]
        w = (s * self.K**-0.5).masked_fill(~seen, torch.finfo(s.dtype).min).softmax(-1)
        y = torch.einsum("bhtr,hvr->bthv", torch.einsum("bhts,bsr->bhtr", w, latent), self.v_up)
        return self.o(y.flatten(2))


from veriformer.properties import Subject


def build(c):
    return MLA(c.d_model, c.num_heads)


def forward(model, x, attention_mask=None):
    return model(x, attention_mask)


undeclared = Subject(kind="self_attention", build=build, forward=forward)
declared = Subject(
    kind="self_attention", name="latent attention", build=build, forward=forward,
    declares={"causal": True, "positions": "rotary", "rotary_dim": ROT, "bias": False, "structure": "other",
              "padding_side": "both", "beyond_max_len": "works"},
)
