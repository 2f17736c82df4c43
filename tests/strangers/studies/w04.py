import torch
from torch import nn

from veriformer.ablations import Recipe, Study, Task, Variant

# character-level next token prediction on a periodic text
TEXT = "the cat sat on the mat and the dog sat on the log "
CHARS = sorted(set(TEXT))
IDS = torch.tensor([CHARS.index(c) for c in TEXT * 20])


def windows(seed, step, block=12, batch=24):
    g = torch.Generator().manual_seed(seed + 4096 * step)
    start = torch.randint(len(IDS) - block - 1, (batch,), generator=g)
    return (torch.stack([IDS[s : s + block] for s in start]), torch.stack([IDS[s + 1 : s + block + 1] for s in start]))


class CharRNN(nn.Module):
    def __init__(self, hidden=32, layers=1):
        super().__init__()
        self.emb = nn.Embedding(len(CHARS), 12)
        self.gru = nn.GRU(12, hidden, layers, batch_first=True)
        self.out = nn.Linear(hidden, len(CHARS))

    def forward(self, x):
        return self.out(self.gru(self.emb(x))[0])


def accuracy(model, batch):
    x, y = batch
    with torch.no_grad():
        return (model(x).argmax(-1) == y).float().mean(-1)


study = Study(
    name="char-rnn",
    question="One layer or two?",
    build=CharRNN,
    tasks=Task(name="cat", data=windows, metric=accuracy),
    recipe=Recipe(steps=50, learning_rate=1e-2),
    variants=[Variant("one layer"), Variant("two layers", "a second layer", {"layers": 2})],
)
