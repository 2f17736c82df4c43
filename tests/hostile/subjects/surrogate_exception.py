# expect ERROR: the subject raised ValueError: half a letter
from veriformer.properties import Subject


def forward(m, x):
    raise ValueError("half a letter \ud800 \x1b[31m <script>")


mine = Subject(kind="layer", forward=forward)
