import logging

from torch import nn

from veriformer.properties import Subject

log = logging.getLogger(__name__)


class GPT(nn.Module):
    def __init__(self, vocab, width, heads, depth, hidden):
        super().__init__()
        self.wte = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.wte.weight

    def optim_groups(self, weight_decay=0.1):
        params = {n: p for n, p in self.named_parameters() if p.requires_grad}
        decay = [p for p in params.values() if p.dim() >= 2]
        nodecay = [p for p in params.values() if p.dim() < 2]
        log.info("decayed: %d numbers", sum(p.numel() for p in decay))
        log.info("not decayed: %d numbers", sum(p.numel() for p in nodecay))
        return [
            {"params": list(decay), "weight_decay": weight_decay},
            {"params": list(nodecay), "weight_decay": 0.0},
        ]


subject = Subject(
    kind="parameter_groups",
    name="GPT optimiser groups",
    build=lambda c: GPT(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff),
    forward=lambda m: m.optim_groups(),
    declares={"tied": True},
)
