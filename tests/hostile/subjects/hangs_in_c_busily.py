# expect TIMEOUT: did not react
# expect BLOCKED: given up
from veriformer.properties import Subject

mine = Subject(kind="layer", forward=lambda m, x: sum(range(10**15)))  # a loop that looks for no signals
