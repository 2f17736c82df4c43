# expect ERROR: cannot be imported: RuntimeError: no weights here (raises_at_import.py, line 2)
raise RuntimeError("no weights here")
