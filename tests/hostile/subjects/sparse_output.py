# expect ERROR: sparse
from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: (x * 2).to_sparse())
