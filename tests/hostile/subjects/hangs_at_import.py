# expect TIMEOUT: importing it took longer than
while True:
    pass
