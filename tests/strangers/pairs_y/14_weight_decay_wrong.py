WHAT = "Norms are told by 'ln_' in their name, which the last one, norm_f, has not, so that its gain decays (line 46)."
import torch
from torch import nn
from torch.nn import functional as F
from veriformer.properties import DrawnConfig, Subject

WEIGHT_DECAY = 0.1


class Block(nn.Module):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.fc_in = nn.Linear(width, hidden)
        self.fc_out = nn.Linear(hidden, width)

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, attn_mask=hidden, need_weights=False)[0]
        return x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))


class LanguageModel(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb_tokens = nn.Embedding(c.vocab_size, c.d_model)
        self.emb_positions = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c.d_model, c.num_heads, c.d_ff) for _ in range(c.num_layers))
        self.norm_f = nn.LayerNorm(c.d_model)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)

    def forward(self, tokens):
        x = self.emb_tokens(tokens) + self.emb_positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm_f(x))


def parameter_groups(model):
    """Matrices decay; biases, norms and embeddings do not."""
    decay, keep = [], []
    for name, parameter in model.named_parameters():
        spared = name.endswith("bias") or "ln_" in name or "emb_" in name
        (keep if spared else decay).append(parameter)
    return [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": keep, "weight_decay": 0.0},
    ]


subject = Subject(
    kind="parameter_groups",
    name="groups for AdamW",
    build=LanguageModel,
    forward=parameter_groups,
)
