# expect TIMEOUT: importing it took longer than
def mine():
    while True:
        pass
