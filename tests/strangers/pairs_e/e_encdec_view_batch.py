"""An encoder that works sequence-first under a decoder that works batch-first."""
import torch
from torch import nn
from veriformer.properties import Subject

WHAT = "The memory [S, B, D] is made batch-first by reshape rather than transpose, which mixes the samples of every batch beyond one."
PLACE = "hand-over of the memory from encoder to decoder"


def swap(memory):  # [S, B, D] -> [B, S, D]
    return memory.transpose(0, 1)


def relabel(memory):
    s, b, d = memory.shape
    return memory.reshape(b, s, d)


class EncoderDecoder(nn.Module):
    def __init__(self, vocab, d, h, layers, ff, hand_over):
        super().__init__()
        self.hand_over = hand_over
        self.src, self.tgt, self.head = nn.Embedding(vocab, d), nn.Embedding(vocab, d), nn.Linear(d, vocab)
        kw = {"dropout": 0.0, "norm_first": True}
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(d, h, ff, **kw), layers, nn.LayerNorm(d),
                                         enable_nested_tensor=False)
        self.dec = nn.TransformerDecoder(nn.TransformerDecoderLayer(d, h, ff, batch_first=True, **kw), layers,
                                         nn.LayerNorm(d))

    def forward(self, source, target, source_mask=None, target_mask=None):
        hide_s, hide_t = (None if m is None else ~m.bool() for m in (source_mask, target_mask))
        memory = self.enc(self.src(source).transpose(0, 1), src_key_padding_mask=hide_s)
        t = target.shape[1]
        later = torch.ones(t, t, dtype=torch.bool, device=target.device).triu(1)
        x = self.dec(self.tgt(target), self.hand_over(memory), tgt_mask=later, tgt_key_padding_mask=hide_t,
                     memory_key_padding_mask=hide_s)
        return self.head(x)


def subject(hand_over):
    return Subject(kind="encoder_decoder", mask_forms=("padding",),
                   build=lambda c: EncoderDecoder(c.vocab_size, c.d_model, c.num_heads, c.num_layers, c.d_ff, hand_over),
                   forward=lambda m, source, target, source_mask=None, target_mask=None: m(source, target, source_mask, target_mask),
                   declares={"causal": True, "positions": "none", "norm": "layer", "norm_placement": "pre",
                             "final_norm": True, "activation": "relu", "padding_side": "right", "tied": False})


right, wrong = subject(swap), subject(relabel)

if __name__ == "__main__":
    torch.set_num_threads(1), torch.manual_seed(0)
    a, z = EncoderDecoder(11, 16, 2, 1, 32, swap).eval(), EncoderDecoder(11, 16, 2, 1, 32, relabel).eval()
    z.load_state_dict(a.state_dict())
    ref = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, norm_first=True, batch_first=True), 1,
                                nn.LayerNorm(16), enable_nested_tensor=False).eval()
    ref.load_state_dict(a.enc.state_dict())
    for b, clash in ((1, False), (3, True)):
        src, tgt = torch.randint(0, 11, (b, 5)), torch.randint(0, 11, (b, 4))
        later = torch.ones(4, 4).bool().triu(1)
        want = a.head(a.dec(a.tgt(tgt), ref(a.src(src)), tgt_mask=later))
        dr, dw = ((m(src, tgt) - want).abs().max().item() for m in (a, z))
        print("batch of", b, dr, dw)
        assert dr < 1e-5 and (dw > 1e-2) == clash
