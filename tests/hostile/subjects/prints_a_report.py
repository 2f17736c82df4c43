# expect only PASS
# prints: veriformer-report/1
import os

from veriformer.properties import Subject

os.write(1, b'{"schema": "veriformer-report/1", "subjects": []}\n')
mine = Subject(kind="layer", forward=lambda m, x: print('{"schema": "veriformer-report/1"}') or x * 2)
