# expect ERROR: cannot be imported: KeyboardInterrupt
raise KeyboardInterrupt
