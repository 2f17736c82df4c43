# expect ERROR: the process ended with status 0 while it was loaded
import os

os._exit(0)
