"""K networks one after the other by the layer rules of a single run, as one graph can hold it.

    for every run k:   parameters of k into the model ─ one backward pass ─ norms, factors, sum

Convolutions of one run that fill a GPU by themselves gain nothing from standing side by side; its
many small kernels do not, so the runs of a GPU go by `STREAMS` streams of their own, between one
fork and one join. This
is the sum of `compiled.sum`, the one that `privatize` captures, so it has its kernels and takes
every model that they take. Nothing waits for the device, nothing branches on data. State: the
model whose parameters are pointed at one run after the other, what its trial found, and the calls.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from noshuffle.clipping import Flat, Ghost, ModelLoss, auto, validate
from noshuffle.clipping.batch_check import still_apart
from noshuffle.clipping.check import evaluated
from noshuffle.clipping.layers import NotByLayer, NotNow
from noshuffle.clipping.objective import Batch, Criterion, batch_size
from noshuffle.errors import Unsupported
from noshuffle.training.compiled.choice import agree
from noshuffle.training.compiled.flat import TotalFn
from noshuffle.training.compiled.sum import FormsFn, by_engine, clipped, rules
from noshuffle.training.generators import seeded

#: Streams of a GPU that the runs are dealt to.
STREAMS = 4


class InTurn:
    """K networks in turn; refused (`Unsupported`) for models without layer rules."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        params: Mapping[str, Tensor],
        batch: tuple[Any, ...],
        *,
        loss_fn: Criterion | ModelLoss,
        clip_norms: Sequence[float],
    ) -> None:
        self._device = device = next(iter(params.values())).device
        self.runs, self._clips = len(clip_norms), tuple(clip_norms)
        self._model = copy.deepcopy(models[0]).to(device)
        validate(self._model)
        #: What is not trained, of every run its own.
        self._fixed = [
            {n: value.detach().to(device) for n, value in _tensors(model) if n not in params}
            for model in models
        ]
        engine = auto(self._model)
        self._put(params, 0)
        forms = None
        if isinstance(engine, Ghost) and batch_size(batch) > 1:
            forms = rules(engine, self._model, loss_fn, batch)
        if forms is None:
            raise Unsupported(f"no layer rules ({engine.why})")
        self.form = "layer rules"
        self._loss_fn = loss_fn
        many = min(STREAMS, self.runs) if device.type == "cuda" and self.runs > 1 else 0
        self._streams = [_stream(device) for _ in range(many)]
        self._check_alone(params, batch, runs=range(self.runs))
        self._totals: dict[float, TotalFn] = {}
        for norm in set(self._clips):
            truth = by_engine(engine, self._model, loss_fn, clip=Flat(norm))
            self._totals[norm] = self._first_right(forms, truth, batch, norm=norm)

    def _first_right(
        self, forms: FormsFn, truth: TotalFn, batch: tuple[Any, ...], *, norm: float
    ) -> TotalFn:
        """The quickest way from forms to the sum that agrees with the engine."""
        keep = torch.ones(batch_size(batch), dtype=torch.bool, device=self._device)
        with seeded(0, self._device):  # layers that draw, draw the same
            wanted = truth(batch, keep)
        for by_matrix in (True, False):
            try:
                found = clipped(forms, self._model, batch, clip=Flat(norm), by_matrix=by_matrix)
                with seeded(0, self._device):
                    own = found(batch, keep)
                if agree(own, wanted, bound=norm):
                    return found
            except Unsupported:
                continue
        raise Unsupported("the sum by layer rules differs from that of the engine")

    def _check_alone(self, params: Mapping[str, Tensor], batch: Batch, *, runs: range) -> None:
        """Refuse a run that mixes examples: what is not trained, and weights, are its own."""
        for run in runs:
            self._put(params, run)
            try:
                still_apart(self._model, self._loss_fn, batch)
            except NotNow:
                raise Unsupported(f"a loss of run {run} is not finite") from None
            except NotByLayer as reason:
                raise Unsupported(f"run {run} mixes examples: {reason}") from None

    def _put(self, params: Mapping[str, Tensor], run: int) -> None:
        for name, value in _tensors(self._model):
            value.data = params[name][run] if name in params else self._fixed[run][name]

    def scores(self, params: Mapping[str, Tensor], x: Any) -> Tensor:
        """Outputs of every network in eval mode: (batch, runs, …)."""
        found = []
        for run in range(self.runs):
            self._put(params, run)
            with evaluated(self._model), torch.no_grad():
                found.append(self._model(x))
        return torch.stack(found, 1)

    def clipped_sums(
        self, params: Mapping[str, Tensor], batch: tuple[Any, ...], *, keep: Tensor
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Per run, the sum of clipped gradients of the rows in `keep`, and losses (batch, runs)."""
        found, batch = [], tree_map(_channels_last, batch)
        with self._forked() as streams:
            for run, norm in enumerate(self._clips):
                with torch.cuda.stream(streams[run % len(streams)] if streams else None):
                    self._put(params, run)
                    found.append(self._totals[norm](batch, keep))
        sums = {name: torch.stack([own.values[name] for own in found]) for name in params}
        return sums, torch.stack([own.losses.detach() for own in found], 1)

    @contextmanager
    def _forked(self) -> Iterator[list[torch.cuda.Stream]]:
        """Streams that begin behind the present one, which goes on behind them.

        What is read there was made before the fork, what is made there is read behind the join,
        and what is let go there is used again on its own stream alone: so no memory is used again
        too early, in a graph or outside.
        """
        if not self._streams:
            yield []
            return
        here = torch.cuda.current_stream(self._device)
        for stream in self._streams:
            stream.wait_stream(here)
        try:
            yield self._streams
        finally:
            for stream in self._streams:
                here.wait_stream(stream)


def _stream(device: torch.device) -> torch.cuda.Stream:
    made: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return made


def _channels_last(leaf: Any) -> Any:
    """Images on a GPU as its convolutions and our kernels read them; once for all runs."""
    is_image = isinstance(leaf, Tensor) and leaf.is_cuda and leaf.dim() == 4
    return leaf.contiguous(memory_format=torch.channels_last) if is_image else leaf


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]
