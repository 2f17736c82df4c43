# expect ERROR: forward returned shape [2, 4, 8] for inputs [2, 5, 8]
from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: x[:, 1:] * 2)
