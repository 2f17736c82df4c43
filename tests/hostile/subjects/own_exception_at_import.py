# expect ERROR: cannot be imported: Stop: enough (own_exception_at_import.py, line 6)
class Stop(BaseException):
    pass


raise Stop("enough")
