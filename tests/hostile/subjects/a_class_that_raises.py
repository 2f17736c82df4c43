# expect ERROR: a_class_that_raises.py
class Meta(type):
    def __getattribute__(cls, name):
        raise RuntimeError("no attributes")


class mine(metaclass=Meta):  # noqa: N801
    pass
