# expect ERROR: cannot be imported: ModuleNotFoundError: No module named 'no_such_module_anywhere' (import_error.py, line 2)
import no_such_module_anywhere
