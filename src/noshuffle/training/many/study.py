"""Many runs at once, for studies: K seeds or settings of one small model in one program.

    g[k, i] = ∇ loss(θ_k; x_i)          per run k and example i
    θ_k ← momentum step on (Σ_i clip(g[k, i], ζ_k) + z_k ζ_k · row t of C_k⁻¹Z_k) / B

All runs share the data order, the loss and the batch size; everything else is their own. The models
run side by side in the form that suits them (`sum`); on CUDA a step of all runs is one graph. Each
run is private by itself if the rows come as its plan says (`ids` let the study check that); showing
all of them costs `joint_mu`. A study cannot be resumed.

>>> from noshuffle.strategies import identity
>>> x = torch.randn(64, 5); y = (x[:, 0] > 0).long()
>>> rates = (0.1, 0.5, 2.0)
>>> study = Study(lambda: nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 2)),
...               [Setting(noise_multiplier=1.0, learning_rate=rate) for rate in rates],
...               strategy=identity(), steps=4, batch_size=16)
>>> for i in range(0, 64, 16):
...     losses = study.step(x[i : i + 16], y[i : i + 16])
>>> study.accuracies(x, y).shape, study.done, study.why
(torch.Size([3]), 4, 'vmap (layer 1 (LayerNorm) has no stacked form); on cpu, eager')
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from noshuffle.clipping import ModelLoss, validate
from noshuffle.clipping.check import trainable
from noshuffle.clipping.objective import Criterion, cuttable
from noshuffle.clipping.objective import batch_size as rows_of
from noshuffle.errors import (
    HorizonExceeded,
    InvalidInput,
    callables,
    instance_of,
    number_tuple,
    whole,
)
from noshuffle.noise import Source
from noshuffle.participation import SinglePass
from noshuffle.plan import Plan
from noshuffle.release.account import Account
from noshuffle.release.ledger import Admission
from noshuffle.release.sampler import Sampler
from noshuffle.statement import PrivacyStatement
from noshuffle.strategies import Strategy, identity
from noshuffle.training.many.graph import StudyGraph, kind_of
from noshuffle.training.many.release import StudyRelease
from noshuffle.training.many.setting import (
    Setting,
    check_settings,
    column,
    momentum_step,
    seeded,
    stack,
)
from noshuffle.training.many.sum import Network, clipped_sums, network_for

Batch = tuple[Tensor, Tensor, Tensor | None]


class Study:
    """K runs in the making; `step` is one step of all of them.

    Guarantees: what changes the parameters of run k is (Σ clip(g) + noise of its own) divided by
    the planned constant, and leaves through `release.Release`. A row with a NaN or infinite
    gradient contributes zero to that run. With `ids`, participation is checked before anything is
    computed; without them the caller feeds rows as the plans say, and there is no statement.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        settings: Sequence[Setting],
        *,
        steps: int,
        batch_size: int,
        strategy: Strategy | None = None,
        loss_fn: Criterion | ModelLoss | None = None,
        learning_rates: Sequence[float] = (),
        source: Source | None = None,
        device: torch.device | str = "cpu",
        capture: bool = True,
        in_turn: bool = False,
        half: bool = False,
        budget: Account | None = None,
    ) -> None:
        """Arguments:

        make_model: builds the model; called once a run, under the seed of its setting.
        batch_size: the constant that every noisy sum is divided by.
        strategy: how noise is correlated for settings without a plan.
        loss_fn: a criterion or `ModelLoss`, as for `privatize`; cross-entropy by default.
        learning_rates: a schedule of factors, one a step (empty: constant).
        source: where noise comes from; fresh keys of the operating system by default.
        capture: whether a step on CUDA may be captured as a graph.
        in_turn: whether the runs of a step are worked on one after the other, by layer rules: for
            models that fill a GPU by themselves.
        half: whether models and losses run under autocast to bfloat16; clipped gradients are added
            up, noised and applied in single precision.
        budget: what all runs on the same data draw on; settings then need plans, and steps ids.
        """
        whole(steps=steps, batch_size=batch_size)
        callables(make_model=make_model)
        if loss_fn is not None and not isinstance(loss_fn, ModelLoss):
            callables(loss_fn=loss_fn)
        instance_of(Sequence, settings=settings)
        learning_rates = number_tuple(learning_rates=learning_rates)
        self.settings = tuple(settings)
        check_settings(self.settings, steps=steps, strategy=strategy, learning_rates=learning_rates)
        if budget is not None and any(setting.plan is None for setting in self.settings):
            raise InvalidInput("a study that draws on a budget needs a plan in every setting")
        self.steps, self.done = steps, 0
        self.fallbacks: list[str] = []
        self._device = torch.device(device)
        self._batch_size, self._rates = batch_size, learning_rates
        self._in_turn, self._half = in_turn, half
        self._loss_fn = nn.CrossEntropyLoss() if loss_fn is None else loss_fn
        self._models = [seeded(make_model, setting.seed) for setting in settings]
        for model in self._models:
            validate(model)
        self.params = stack(self._models, self._device)
        self._velocity = {name: torch.zeros_like(value) for name, value in self.params.items()}
        self._clip = column((s.clip_norm for s in settings), self._device)
        self._rate = column((s.learning_rate for s in settings), self._device)
        self._inertia = column((s.momentum for s in settings), self._device)
        self._factor = torch.ones((), device=self._device)
        single = Plan(
            participation=SinglePass(steps), strategy=strategy or identity(), noise_multiplier=1.0
        )
        self._release = StudyRelease(
            [setting.plan or single for setting in settings],
            {name: tuple(value.shape[1:]) for name, value in self.params.items()},
            multipliers=[s.noise for s in settings],
            clip_norms=[s.clip_norm for s in settings],
            device=self._device,
            source=source,
            budget=budget,
        )
        self._networks: dict[Any, tuple[Network, str]] = {}
        self._network: Network | None = None
        self._form = ""
        self._graph: StudyGraph | None = None
        self._not_captured = ""
        if not capture:
            self._not_captured = "capture=False, eager"
        elif self._device.type != "cuda":
            self._not_captured = f"on {self._device.type}, eager"
        elif not self._release.can_be_captured:
            self._not_captured = "the noise is not fused (install triton and use philox), eager"

    @property
    def runs(self) -> int:
        """K."""
        return len(self.settings)

    @property
    def why(self) -> str:
        """In which form the networks run, and whether a step is one graph."""
        if not self._form:
            return "decided at the first step"
        if self._graph is not None:
            return f"{self._form}; one CUDA graph for up to {self._graph.capacity} rows"
        return f"{self._form}; {self._not_captured}"

    def step(self, *batch: Any, weights: Tensor | None = None, ids: Any = None) -> Tensor:
        """One step of every run on the same batch; the mean loss of each (raw, not private).

        Rows whose weight is 0 are left out (padding); all others count once. `ids` names the unit
        of every row; the plans' participations are then checked.
        """
        if self.done >= self.steps:
            raise HorizonExceeded(f"the study was planned for {self.steps} steps, all are done")
        batch = cuttable(batch)
        size = rows_of(batch)
        if weights is not None:
            instance_of(Tensor, weights=weights)
        keep = None if weights is None else weights != 0
        if keep is not None and keep.shape != (size,):
            raise InvalidInput(f"weights must be one number for each of the {size} rows")
        if ids is not None and any(setting.plan is None for setting in self.settings):
            raise InvalidInput("ids are checked against plans; give every setting a plan")
        rows = None
        if ids is not None:
            rows = np.ones(size, dtype=bool) if keep is None else keep.cpu().numpy()
        admissions = self._release.admit(ids, keep=rows)
        if self._rates:
            self._factor.fill_(self._rates[self.done])
        kind = kind_of(*tree_flatten(batch))
        if size:
            self._choose(batch, kind)
        graph = self._ready(batch, size, kind) if size else None
        if graph is None:
            batch = tree_map(self._here, batch)
            if keep is None:
                keep = torch.ones(size, dtype=torch.bool, device=self._device)
            with self._release.masks(self.done, self._device):
                losses = self._work(batch, keep.to(self._device), admissions)
        else:
            with self._at_home(), self._release.masks(self.done, self._device):
                graph.put(batch, keep, size=size)
                self._release.open(admissions)
                self._release.announce()
                losses = graph.replay()
        self.done += 1
        return losses

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret batches of a sampled plan, which all runs share; pass them on as `ids`."""
        return self._release.sampler(population)

    def model(self, run: int) -> nn.Module:
        """A model of its own with the present parameters of one run."""
        whole(at_least=0, at_most=self.runs - 1, run=run)
        made = copy.deepcopy(self._models[run]).to(self._device)
        with torch.no_grad():
            for name, parameter in trainable(made).items():
                parameter.copy_(self.params[name][run])
        return made

    def statement(self) -> PrivacyStatement:
        """What showing all runs costs together; needs plans, and ids in every step."""
        if any(setting.plan is None for setting in self.settings):
            raise InvalidInput("a study states ε only if every setting has a plan")
        return self._release.statement()

    def scores(self, x: Any) -> Tensor:
        """Outputs of every run in eval mode: (batch, runs, …)."""
        with torch.no_grad():
            return self._chosen().scores(self.params, tree_map(self._here, x))

    def accuracies(self, x: Tensor, y: Tensor, *, chunk: int = 500) -> Tensor:
        """Share of right answers of every run on held-out data."""
        return accuracies(self._chosen(), self.params, x, y, chunk=chunk)

    # -- one step ------------------------------------------------------------------------------

    def _work(
        self, batch: tuple[Any, ...], keep: Tensor, admissions: Sequence[Admission] | None = None
    ) -> Tensor:
        """Clip, sum, row, noise, update; mean losses of the rows that were kept and finite.

        A graph holds no rows: theirs are written before it is replayed.
        """
        sums, losses = self._sum(batch, keep)
        if admissions is not None:
            self._release.open(admissions)
        self._release.add_(sums)
        momentum_step(
            self.params,
            self._velocity,
            sums,
            rate=self._rate * self._factor,
            momentum=self._inertia,
            weight=1.0 / self._batch_size,
        )
        seen = torch.isfinite(losses) & keep[:, None]
        return torch.where(seen, losses, 0.0).sum(0) / seen.sum(0)

    def _sum(self, batch: tuple[Any, ...], keep: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if not len(keep):  # nobody: noise alone
            sums = {name: torch.zeros_like(value) for name, value in self.params.items()}
            return sums, torch.zeros(0, self.runs, device=self._device)
        return clipped_sums(
            self._chosen(), self.params, batch, keep=keep, clip=self._clip, half=self._half
        )

    def _chosen(self) -> Network:
        if self._network is None:
            raise InvalidInput("the form of the networks is chosen at the first step; do one first")
        return self._network

    def _choose(self, batch: tuple[Any, ...], kind: Any) -> None:
        """The form for batches of this kind: other shapes may go other ways through a model."""
        if kind not in self._networks:
            self._networks[kind] = network_for(
                self._models,
                self.params,
                tree_map(self._here, batch),
                loss_fn=self._loss_fn,
                in_turn=[s.clip_norm for s in self.settings] if self._in_turn else (),
                half=self._half,
            )
        self._network, self._form = self._networks[kind]

    def _ready(self, batch: tuple[Any, ...], size: int, kind: Any) -> StudyGraph | None:
        """The graph if this batch can take it; captured at the first step."""
        if not self._not_captured and self._graph is None:
            with self._at_home():
                self._capture(batch, size)
        graph = self._graph
        if graph is None or (size <= graph.capacity and kind == graph.kind):
            return graph
        note = f"a batch of {size} rows is larger than the captured {graph.capacity}: eager"
        if kind != graph.kind:
            note = "a batch was of another kind than the captured one: eager"
        if note not in self.fallbacks:
            self.fallbacks.append(note)
        return None

    def _capture(self, batch: tuple[Any, ...], size: int) -> None:
        capacity = max(size, self._batch_size)
        try:
            graph = StudyGraph(batch, capacity=capacity, device=self._device)
            graph.kind = kind_of(*tree_flatten(batch))
            graph.put(batch, None, size=size)
            keep = torch.ones(capacity, dtype=torch.bool, device=self._device)
            self._release.prepare(self._sum(graph.batch, keep)[0])
            graph.capture(lambda b, k: self._sum(b, k)[1], self._work)
        except Exception as error:
            line = " ".join(str(error).split())[:160]
            self._not_captured = f"not captured ({type(error).__name__}: {line}), eager"
            return
        self._graph = graph

    def _at_home(self) -> AbstractContextManager[Any]:
        on_cuda = self._device.type == "cuda"
        return torch.cuda.device(self._device) if on_cuda else nullcontext()

    def _here(self, leaf: Any) -> Any:
        return leaf.to(self._device) if isinstance(leaf, Tensor) else leaf


def train_many(
    make_model: Callable[[], nn.Module],
    batches: Iterable[Batch],
    settings: Sequence[Setting],
    *,
    steps: int,
    batch_size: int,
    **options: Any,
) -> tuple[Network, dict[str, Tensor]]:
    """Train every setting over the same batches; returns the networks and their parameters.

    `batches` gives (inputs, targets, weights) in order; weights of 0 mark padding, None means ones.
    The other options are those of `Study`.
    """
    instance_of(Iterable, batches=batches)
    study = Study(make_model, settings, steps=steps, batch_size=batch_size, **options)
    for batch in batches:
        if study.done == steps:
            break
        x, y, weights = _parted(batch)
        study.step(x, y, weights=weights)
    if study.done < steps:
        raise InvalidInput(f"{steps} steps were planned, the data gave {study.done}")
    return study._chosen(), study.params


def _parted(batch: Any) -> Batch:
    if isinstance(batch, tuple | list) and len(batch) == 3:
        return batch[0], batch[1], batch[2]
    came = f"{len(batch)} parts" if isinstance(batch, tuple | list) else type(batch).__name__
    raise InvalidInput(
        f"batches must give (inputs, targets, weights), None where all count; got {came}"
    )


def accuracies(
    network: Network, params: Mapping[str, Tensor], x: Tensor, y: Tensor, *, chunk: int = 500
) -> Tensor:
    """Share of right answers of every run on held-out data."""
    instance_of(Tensor, x=x, y=y)
    whole(chunk=chunk)
    device = next(iter(params.values())).device
    right = torch.zeros(network.runs, device=device)
    with torch.no_grad():
        for begin in range(0, len(x), chunk):
            part, target = x[begin : begin + chunk].to(device), y[begin : begin + chunk].to(device)
            scores = network.scores(params, part)
            right += (scores.argmax(2) == target[:, None]).sum(0)
    return right / len(x)
