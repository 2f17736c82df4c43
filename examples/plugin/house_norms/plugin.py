"""What veriformer shall know of our norms: how to judge them, what they must keep, and that it notices where not."""

from house_norms.norm import HouseNorm
from veriformer.properties import Fault, Injected, Subject, broken_by, holds
from veriformer.tests.mutants import fault


# A property: judged on every norm, ours and others'.
@holds(
    "house.odd",
    statement="But for its bias, which is what it makes of 0, a norm is odd.",
    formula="f(-x) = 2 f(0) - f(x)",
    source="The mean changes its sign with x, the variance does not.",
    kinds=["norm"],
)
def a_norm_is_odd(case):
    """Centring and scaling keep the sign, and f(0) is the bias. It holds of LayerNorm and of RMSNorm."""
    built = case.built()
    x = case.normal(2, 3, built.config.d_model, dtype=built.dtype)
    mirrored = 2 * case.call(built, 0 * x) - case.call(built, x)
    case.close(case.call(built, -x), mirrored, "f(-x) is not 2 f(0) - f(x)")
    case.witness()  # the premise held: without one the verdict is VACUOUS


# A fault for every user's run: put into the model that is judged, and the property above must notice.
def _lean(forward, share):
    def broken(model, x):
        output = forward(model, x)
        return output + share * output.abs()

    return Injected(broken)


LEANING = Fault(
    "a norm leans to one side",
    noticed_by=("house.odd",),
    matters="a bias that no parameter holds, and no weight decay reaches",
    fits=lambda subject: subject.kind == "norm",
    wrap=_lean,
)


# An adapter: how a class of ours is built and called, so that `veriformer check norm.py:HouseNorm` needs no more words.
def _subject(cls):
    return Subject(
        kind="norm",
        build=lambda c: cls(c.d_model, eps=1e-5),
        forward=lambda m, x: m(x),
        name=cls.__name__,
        declares={"norm": "layer", "structure": "other"},
    )  # no bias


def recognise(thing, kind):
    return _subject(thing) if isinstance(thing, type) and issubclass(thing, HouseNorm) else None


# What `veriformer check house` judges.
SHIPPED = {"norm": _subject(HouseNorm)}


# A row of `veriformer mutants`: a broken model, and who must notice.
@fault("HOUSE-LEAN", "A norm that leans to one side", killed_by=("house.odd",))
def leaning():
    return broken_by(LEANING, SHIPPED["norm"])
