# expect ERROR: was called to make a subject, and raised SystemExit: 3
import sys


def mine():
    sys.exit(3)
