"""How a case calls the subject: its models, one call on a path, and a walk along all paths that it offers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from veriformer.properties.bench.guards import SubjectError
from veriformer.properties.bench.measured import is_deterministic_in_training, mask_axes
from veriformer.properties.bench.pool import Built, duplicate
from veriformer.properties.bench.workbench import Workbench
from veriformer.properties.engine.drawing import Drawing
from veriformer.properties.engine.draws import Draws
from veriformer.properties.subject.forms import forms_of
from veriformer.properties.subject.inputs import is_too_short
from veriformer.properties.subject.kinds import SEQUENCE_KINDS
from veriformer.properties.subject.layouts import laid_out
from veriformer.properties.subject.palette import FEW, LONG, MANY
from veriformer.properties.subject.paths import COMPILED_LENGTH, DEFAULT, GRAD_MODES, Path, in_turn, paths_of, walking
from veriformer.properties.subject.raised import first_line
from veriformer.properties.subject.subject import Subject

_AXES = {"attention": ("B", "H", "T", "K"), "softmax": (), "norm": (), "loss": ("B", "T")}

_SAVES_FOR_BACKWARD = "Inference tensors cannot be saved for backward"
"""What TorchScript raises in inference mode, whose graphs save tensors whatever the mode: torch's limit, no defect.

In the other modes it is one: a tensor was kept from a call in inference mode.
"""


_NO_KERNEL = ("No available kernel", "No viable backend")
"""What torch raises where a chosen kernel is not made for these inputs: any other error of a backend is one."""


class Caller:
    """The subject's forward on one model, handed to a step that calls it: on these arguments, or on those it has.

    Or another callable of the subject, which `part` names.
    """

    def __init__(self, case: Calling, built: Built, args: tuple[Any, ...], path: Path, part: str = "forward") -> None:
        self.case = case
        self.built = built
        self.args = args
        self.path = path
        self.part = part

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        if self.part != "forward":
            return self.case.ask(self.part, *self.args, *args, built=self.built, path=self.path)
        return self.case.call(self.built, *self.args, *args, path=self.path)


def refuses(run: Callable[[], object]) -> Tensor:
    """Return whether a call raises an error, as it is to do: a step for `Calling.apply`."""
    try:
        run()
    except Exception:
        return torch.tensor(True)
    return torch.tensor(False)


def has_graph(output: Tensor) -> Tensor:
    """Return whether a gradient can be taken of an output: a step for `Calling.apply`."""
    return torch.tensor(output.requires_grad)


def _sizes_of(subject: Subject, built: Built, args: tuple[Any, ...]) -> dict[str, int | str]:
    """Return what a call reaches: the axes of its first input, the sizes of the model, the dtype."""
    given = args[1:] if subject.kind == "encoder_decoder" else args  # lengths are those of the target
    first = next((x for x in given if isinstance(x, Tensor)), None)
    axes = _AXES.get(subject.kind, ("B", "T") if subject.kind in SEQUENCE_KINDS else ())
    sizes: dict[str, int | str] = {}
    if first is not None and first.ndim >= len(axes):
        sizes |= dict(zip(axes, first.shape, strict=False))
        if first.is_floating_point() and built.module is None:
            sizes["dtype"] = str(first.dtype).removeprefix("torch.")
    if built.module is not None:
        config = built.config
        sizes |= {"d_model": config.d_model, "num_heads": config.num_heads, "num_layers": config.num_layers}
        sizes["dtype"] = str(built.dtype).removeprefix("torch.")
    return sizes


class Calling(Drawing):
    """The calls of one case; see `Case`."""

    def __init__(self, bench: Workbench, draws: Draws, *, turn: int = 0) -> None:
        """Make a case.

        Args:
            bench: the subject.
            draws: what is drawn.
            turn: 0: walk every path; else the first one and, of the others, every `TURNS`th, beginning with this one.
        """
        super().__init__(bench, draws)
        self.path = ""
        self._turn = turn
        self._built: Built | None = None
        self._walking = DEFAULT
        self._refused = False
        self._called_with: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def built(self, *, dtype: torch.dtype | None = None, raw: bool = False, fresh: bool = False) -> Built:
        """Return the model for the drawn sizes.

        Args:
            dtype: drawn if None.
            raw: with the weights of its own initialisation instead of re-drawn ones.
            fresh: one of its own, free to be altered; else it is shared and must be left as it is.
        """
        config = self.config()
        chosen = dtype or self.dtype()
        maker = self.bench.pool.fresh if fresh else self.bench.pool.get
        self._built = maker(config, chosen, raw=raw)
        return self._built

    def built_at(self, dtype: torch.dtype, **sizes: int) -> Built | None:
        """Return the model with some of the drawn sizes replaced by others; None where it has no such sizes.

        An instance, and a function that names its sizes, have the sizes that they have; a `domain` says which there
        are; and what raises while it is built for such sizes need not have them.
        """
        subject = self.subject
        if subject.module is not None or (subject.is_functional and subject.config is not None):
            return None
        if any(name in subject.domain and size not in subject.domain[name] for name, size in sizes.items()):
            return None
        try:
            self._built = self.bench.pool.get(replace(self.config(), **sizes), dtype)
        except SubjectError:
            return None
        return self._built

    def copy_of(self, built: Built) -> Built:
        """Return a model of its own with the same weights; what is no torch module stays as it is.

        Raises:
            NotSpokenOfError: the model refuses to be copied (it keeps a tensor with a graph, say).
        """
        if not isinstance(built.module, nn.Module):
            return built
        try:
            twin = duplicate(built.module)
        except Exception as problem:
            self.does_not_apply(f"the model refuses to be copied: {type(problem).__name__}: {first_line(problem)}")
        if self.bench.recorder:
            self.bench.recorder.copied(built.module, twin)
        return replace(built, module=twin)

    def caller(self, built: Built, *args: Any, path: Path = DEFAULT, part: str = "forward") -> Caller:
        """Return the subject's forward on a model, or another callable of it, for a step to call.

        Args:
            built: the model.
            args: what to call it on; none if the step has the arguments.
            path: the way to call. A script does not see it: the step itself must hold its modes.
            part: which callable of the subject.
        """
        return Caller(self, built, args, path, part)

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return `function(*args)`: a step that is more than an operation of torch, which a script takes over whole.

        Args:
            function: of a module; what it uses is torch, Python and other functions of modules.
            args: tensors, plain values, models, and `Caller`s for what it calls.
        """
        return self.bench.recorder.apply(function, args) if self.bench.recorder else function(*args)

    @property
    def walks_all_paths(self) -> bool:
        """Whether it is the first case, or one that is looked at closely."""
        return not self._turn

    @property
    def was_refused(self) -> bool:
        """Whether the subject raised on the path that is being walked, and was called on a plainer one."""
        return self._refused

    def call(self, built: Built, *args: Any, path: Path = DEFAULT, **kwargs: Any) -> Tensor:
        """Call the subject's forward on a path; None-valued keywords are not passed.

        Raises:
            SubjectError: it raised, or returned no tensor.
        """
        given = {k: v for k, v in kwargs.items() if v is not None}
        self._built = built
        if is_too_short(self.subject, args):
            self.reject(f"it is declared to take no sequence shorter than {self.subject.shortest}")
        for form in forms_of(self.subject, args, given, self._config):
            self.bench.tally.paths[form] = self.bench.tally.paths.get(form, 0) + 1
        output = self._called(built, args, given, path)
        self._called_with = (args, given)
        self._note_reach(built, args)
        return output

    def _note_reach(self, built: Built, args: tuple[Any, ...]) -> None:
        """Keep what was reached; the same sizes are looked at once in a property."""
        tally, given = self.bench.tally, [(x.shape, x.dtype) for x in args if isinstance(x, Tensor)]
        key = (id(built.config), built.dtype, *given)
        if key not in tally.reached:
            tally.reached[key] = built.config  # held, so that no other one is given its id
            tally.note_reach(_sizes_of(self.subject, built, args))

    def _called(self, built: Built, args: tuple[Any, ...], given: dict[str, Any], path: Path) -> Tensor:
        mask = given.get("attention_mask")
        if self.subject.kind == "attention" and isinstance(mask, Tensor) and mask.ndim == 4:
            axes = mask_axes(self.bench)
            if axes < 4:
                return self._with_axes(axes, path, built, args, given)
        return self._call_or_plainly(path, built, args, given)

    def _with_axes(self, axes: int, path: Path, built: Built, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        """Call with masks of the axes that the subject takes; one sample after another where these hold no batch."""
        mask = given["attention_mask"]
        if mask.shape[1] > 1:
            self.reject("its mask is one for all heads")
        batch = args[0].shape[0]
        if axes == 1:
            if not torch.equal(mask, mask[:, :, :1].expand_as(mask)):
                self.reject("its mask hides a key from every query or from none")
            rows = mask[:, 0, 0].expand(batch, -1)
            return self._call_or_plainly(path, built, args, {**given, "attention_mask": rows})
        if axes == 3:
            return self._call_or_plainly(
                path, built, args, {**given, "attention_mask": mask[:, 0].expand(batch, -1, -1)}
            )
        outputs = [
            self._call_or_plainly(
                path, built, tuple(x[b : b + 1] for x in args), {**given, "attention_mask": mask[b % len(mask), 0]}
            )
            for b in range(batch)
        ]
        return torch.cat(outputs)

    def _call_or_plainly(self, path: Path, built: Built, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        """Call on a path; where that is one of its extras and raises, without them."""
        is_extra = path is self._walking and (path.layout or path.autocast or path.compiled)
        try:
            return self._call_on(path, built, args, given)
        except SubjectError as problem:
            if path.mode == "inference" and _SAVES_FOR_BACKWARD in str(problem):
                self._refused = True
                return self._call_on(replace(path, mode="no_grad"), built, args, given)
            has_no_kernel = path.backend != "default" and any(words in str(problem) for words in _NO_KERNEL)
            if not (is_extra or has_no_kernel):
                raise
            self._refused = True  # judged by numerics.strided, .autocast and .compile; not again by every property
            return self._call_on(Path(mask=path.mask, mode=path.mode), built, args, given)

    def _call_on(self, path: Path, built: Built, args: tuple[Any, ...], given: dict[str, Any]) -> Tensor:
        if path.layout:
            args = tuple(laid_out(x, path.layout) if isinstance(x, Tensor) else x for x in args)
        if self.bench.recorder:
            self.bench.recorder.path = path
        with walking(path, self.subject, built.module, self.bench.device):
            return self.bench.forward(built, *args, compiled=path.compiled, **given)

    def paths(
        self,
        *,
        masks: Sequence[str] = ("none", "ones"),
        modes: Sequence[str] = GRAD_MODES,
        training: bool = False,
        compiled: bool = False,
    ) -> Iterator[Path]:
        """Go through the paths that the subject offers, or those whose turn it is; each is counted as walked.

        Args:
            masks: forms of mask that the property can use.
            modes: gradient modes that it can use.
            training: whether it also holds in train mode, where the model called last is deterministic there.
            compiled: whether to walk torch.compile too: at one size, since every new form of input is compiled anew.
        """
        if training:
            training = self._built is not None and is_deterministic_in_training(self.bench, self._built)
        single = self._built is not None and self._built.dtype == torch.float32
        autocast = single and isinstance(self._built.module, torch.nn.Module) if self._built else False
        at_one_size = self._config == self.bench.configs[0] and self.choices.get("T") == COMPILED_LENGTH
        compiles = compiled and autocast and at_one_size and self.bench.compiles
        offered = paths_of(
            self.subject, masks=masks, modes=modes, training=training, autocast=autocast, compiled=compiles
        )
        chosen = in_turn(offered, self._turn)
        if self.reaches and self._turn:
            large = self.bench.pool.is_large
            more = offered[1:] if self.choices.get("T", 0) <= (FEW if large else MANY) else []
            if self.choices.get("reach") != LONG and self.bench.settings.profile == "quick":
                more = [path for path in more if not path.autocast]  # its rounding is measured on a model of its own
            # without gradients nothing is kept of a long forward; that they change no output is seen at small lengths
            lean = replace(offered[0], mode="no_grad") if large else offered[0]
            first = lean if lean in offered else offered[0]
            chosen = [first, *more[self._turn % max(len(more), 1) :][:1]]
        for path in chosen:
            self.path, self._walking, self._refused = str(path), path, False
            yield path
            walked = f"{self.path} (refused)" if self._refused else self.path
            self.bench.tally.paths[walked] = self.bench.tally.paths.get(walked, 0) + 1
        self.path, self._walking = "", DEFAULT

    def modes(self, mask: str = "padded") -> Iterator[Path]:
        """Go through the modes of autograd whose turn it is, each as a path with a form of mask."""
        for path in in_turn([Path(mask=mask, mode=mode) for mode in GRAD_MODES], self._turn):
            self.path = str(path)
            yield path
        self.path = ""

    def ask(self, part: str, *args: Any, path: Path = DEFAULT, built: Built | None = None, **kwargs: Any) -> Any:
        """Call another callable of the subject (`weights`, `decode`, ...); with `built`, its model comes first.

        Raises:
            SubjectError: it raised, or is not there.
        """
        function = getattr(self.subject, part)
        args = args if built is None else (built.module, *args)
        if self.bench.recorder:
            self.bench.recorder.path = path
        return self.bench.call(function, *args, **kwargs)
