# expect ERROR: the process sent what is no answer while the subject was judged
# expect BLOCKED: given up
from veriformer.properties import Subject
from veriformer.properties.judging.judge import Judge


def forward(m, x):
    Judge.judge = lambda *given, **more: 7
    return x * 2


mine = Subject(kind="layer", forward=forward, declares={"causal": True})
