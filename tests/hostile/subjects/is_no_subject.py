# expect ERROR: 'int' is not recognised
mine = 7
