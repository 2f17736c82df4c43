# expect ERROR: cannot be imported: SystemExit: 0 (exits_at_import.py, line 4)
import sys

sys.exit(0)
