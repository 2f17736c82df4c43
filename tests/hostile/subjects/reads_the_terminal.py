# expect ERROR: the subject raised EOFError
from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: x * float(input("factor? ")))
