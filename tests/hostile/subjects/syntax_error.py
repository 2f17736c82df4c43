# expect ERROR: SyntaxError: '(' was never closed (syntax_error.py, line 2)
mine = Subject(kind=
