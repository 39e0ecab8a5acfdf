"""The passes of an unchanged loop (`loop_pass`), heard and kept for `private.optimizer`.

A forward hook keeps the inputs of a pass; hooks on its outputs keep c = ∂ℓ/∂output, with the factor
and the reduction of the loss taken out (`loss_graph`). Of a model that computes its loss itself
nothing but the inputs is needed. Random layers draw from a generator that is set for the step and
the pass; the user's generators go on as if nothing had been drawn. `.grad` that was cleared takes
the passes before it along, as in a plain loop. State: the passes since the last step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from noshuffle.training.generators import generators
from noshuffle.training.heard_backward import hearing, listen
from noshuffle.training.hooks import ModelHook
from noshuffle.training.loop_pass import Pass, versions
from noshuffle.training.loss_graph import reaches, read_loss, trained_by
from noshuffle.training.loss_reading import LossReading
from noshuffle.training.outputs import CARRIED, Carried, apart, tensors_of
from noshuffle.training.pass_writes import PassWrites
from noshuffle.triton_shim import is_capturing

#: Outputs that a loss may be made of.
LATEST = 256
ONE_LOSS = (
    "one loss over several passes through the model: an example that is in more than one of them "
    "would count more than once; use private.step with a ModelLoss"
)
OUTSIDE = (
    "the loss gives raw gradients to a parameter of shape {shape} outside the private model (a "
    "head, a teacher, a weight of the loss): whatever trains it is not private, and this model "
    "learns from it; make it part of the model, or freeze it with requires_grad_(False)"
)
NONE = "no backward pass through the model since the last step"
SILENT = f"{NONE}; call loss.backward() first (private.step takes an empty batch)"
IN_EVAL = f"{NONE}: it was in eval mode, and is heard in training mode only; call model.train()"
UNSEEN = (
    f"{NONE}, but a loss.backward(): zero_grad() came after it, or parts of the model, its forward "
    "or a copy were called instead of model(…)"
)
UNKNOWN = (
    f"{NONE}: it gives a {{kind}}, whose tensors are not seen; let it return a tensor, or a tuple, "
    "dictionary or dataclass of tensors"
)


def are_cleared(parameters: list[nn.Parameter], *, by_value: bool) -> bool:
    """Whether there is no raw gradient: none at all, or zeros, if those are looked for."""
    for p in parameters:
        if p.grad is not None and not (by_value and not bool(p.grad.any())):
            return False
    return True


class Listener:
    """Keeps what `private.optimizer` needs of the passes through a model.

    `seed(k)` is for the random layers of the k-th pass since the last step.
    """

    def __init__(self, model: nn.Module, seed: Callable[[int], int]) -> None:
        self.is_paused = False
        self.passes: list[Pass] = []
        self.refusal = ""
        self.count = 0  # passes since the last step
        self.is_due = True  # whether inputs and gradients of the next step are read (1, 2, 4, …)
        self._seed = seed
        self._reading: LossReading | None = None
        self._heard: Pass | None = None  # the pass that the current loss came from
        self._starts: dict[int, int] = {}  # outputs by sequence number, and the numbers of passes
        self._carried = Carried()
        self.writes = PassWrites(model)
        self._passes_ever = 0
        self.own = [p for p in model.parameters() if p.requires_grad]
        self.missed = SILENT  # why there is no pass, where there is none
        self.warning = ""
        self._before: list[tuple[torch.Generator, Tensor]] = []
        self._handles = [
            model.register_forward_pre_hook(ModelHook(self, "begin")),
            model.register_forward_hook(
                ModelHook(self, "hear"), with_kwargs=True, always_call=True
            ),
            model.register_load_state_dict_pre_hook(ModelHook(self, "loading")),  # type: ignore[no-untyped-call]
            model.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
                ModelHook(self, "loaded")
            ),
        ]
        for handle in self._handles:
            weakref.finalize(self, handle.remove)
        listen(self, is_on=True)

    def clear(self) -> None:
        """Forget what was heard. A pass whose loss has not come back yet may still do so."""
        self.drop()
        self.refusal = ""

    def drop(self) -> None:
        """Forget the gradients that came back so far."""
        for one in self.passes:
            one.forget()
        self.passes = []

    def forget(self) -> None:
        """The same after a step, or the attempt at one."""
        self.clear()
        self.count, self.missed = 0, SILENT
        self._carried.end_step()

    def stop(self) -> None:
        """Stop listening to the model."""
        for handle in self._handles:
            handle.remove()
        listen(self, is_on=False)
        self.clear()

    def begin(self, module: nn.Module, args: Any) -> None:
        """A forward pass begins: its random layers draw what the second one will draw."""
        if not module.training and torch.is_grad_enabled():
            self.missed = IN_EVAL
        is_heard = module.training and torch.is_grad_enabled() and not self._before
        if not self._before:
            self.writes.begin(module, is_heard=is_heard)
        if is_heard:
            device = next(module.parameters()).device
            self._before = [(g, g.get_state()) for g in generators(device)]
            for generator, _ in self._before:
                generator.manual_seed(self._seed(self.count))

    def loading(self, *_: Any) -> None:
        """Values are about to be loaded into the model."""
        self.writes.loading()

    def loaded(self, module: nn.Module, _: Any) -> None:
        """Values were loaded into the model."""
        self.writes.loaded(module)

    def hear(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """A forward pass has ended; its output is replaced if it has several parts."""
        if not self._before:
            return None
        before, self._before = self._before, []
        drawn = [(g, g.get_state()) for g, _ in before]
        one = Pass(args, kwargs, seed=self._seed(self.count))
        for generator, state in drawn:
            generator.manual_seed(one.seed)
            one.is_random = one.is_random or not torch.equal(generator.get_state(), state)
        for generator, state in before:
            generator.set_state(state)
        self.count += 1
        self._passes_ever += 1
        one.inputs_at, one.weights_at = versions(tree_leaves((args, kwargs))), versions(self.own)
        one.written = self.writes.end()
        if self.is_due and self._carried.has((args, kwargs)):
            one.refusal = CARRIED
        given = output
        if sum(out.grad_fn is not None for out in tensors_of(output)) > 1:
            with suppress(TypeError):  # a kind that is not made of its parts: as it is
                output = apart(output)
        outputs = tensors_of(output)
        ends = [out for out in outputs if out.requires_grad and out.grad_fn is not None]
        self._carried.keep(ends)
        if not outputs:
            self.missed = UNKNOWN.format(kind=type(output).__name__)
        for number, out in enumerate(outputs):
            if not out.requires_grad or out.grad_fn is None:
                continue
            kind = out.device.type
            if torch.is_autocast_enabled(kind):
                one.cast = f"{kind} {torch.get_autocast_dtype(kind)}".replace("torch.", "")
            start = out.grad_fn._sequence_nr()
            self._starts[start] = self._passes_ever
            if len(self._starts) > LATEST:
                del self._starts[next(iter(self._starts))]
            hook = partial(_arrived, weakref.ref(self), one, str(number), start, out.detach())
            out.register_hook(hook)  # type: ignore[no-untyped-call]
        return None if output is given else output

    def arrived(self, one: Pass, key: str, start: int, out: Tensor, grad: Tensor | None) -> None:
        """A gradient came back to an output: from the loss itself, or on its way.

        None comes to outputs that the loss does not use where a function behind the model had them
        all (DistributedDataParallel).
        """
        if (
            grad is None
            or self.is_paused
            or (self._reading is not None and start not in self._reading.reached)
        ):
            return
        if one not in self.passes:
            self.passes.append(one)
        refusal = one.hear(key, out, grad, self._reading)
        if self._heard not in (None, one):
            refusal = refusal or ONE_LOSS
        self._heard = one
        self.refusal = self.refusal or refusal

    def begin_backward(self, loss: Any, gradient: Any) -> None:
        """Read the factor and the reduction of a loss while its graph is there."""
        self._heard = None
        if self.is_paused:
            return
        if self.missed is SILENT:
            self.missed = UNSEEN
        if not self._starts:  # no pass was heard: this loss is of another model
            return
        given = [loss] if isinstance(loss, Tensor) else list(loss)
        if self._is_graph_of_others(given):
            return
        if are_cleared(self.own, by_value=self.is_due or bool(self.passes)):
            self.drop()  # what came before was cleared with it
        is_plain = gradient is None or isinstance(gradient, Tensor)
        own = gradient if is_plain else next(iter(gradient))
        if len(given) == 1 and isinstance(given[0], Tensor):
            self._reading = self._read(given[0], own)
            return
        refusal = "several losses in one backward(); add them up"
        self._reading = LossReading(refusal=refusal, reached=frozenset(self._starts))

    def _is_graph_of_others(self, losses: list[Any]) -> bool:
        """Whether a CUDA graph of another model is being captured: a number that were read from
        the device meanwhile would end the capture."""
        if not any(isinstance(one, Tensor) and is_capturing(one.device) for one in losses):
            return False
        return not any(isinstance(one, Tensor) and reaches(one, self._starts) for one in losses)

    def _read(self, loss: Tensor, gradient: Tensor | None) -> LossReading:
        """Factor and reduction of a loss."""
        reading = read_loss(loss, self._starts, gradient=gradient)
        if len({self._starts[start] for start in reading.reached}) > 1:
            return replace(reading, refusal=ONE_LOSS)
        if self.is_due and reading.reached:
            self._find_outside(loss)
        return reading

    def _find_outside(self, loss: Tensor) -> None:
        """Keep a warning of parameters that this loss trains outside of private models."""
        inside = {id(p) for one in hearing() for p in one.own}
        found = [p for p in trained_by(loss, self._starts) if id(p) not in inside]
        if found:
            self.warning = OUTSIDE.format(shape=tuple(found[0].shape))

    def end_backward(self) -> None:
        self._reading = None


def _arrived(listener: Callable[[], Listener | None], *what: Any) -> None:
    """The hook on an output: it holds the numbers of the output, not its graph."""
    heard = listener()
    if heard is not None:
        heard.arrived(*what)
