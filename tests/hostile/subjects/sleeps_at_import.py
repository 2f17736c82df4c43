# expect TIMEOUT: importing it took longer than
import time

time.sleep(3600)
