"""Private: a model in private training, and the three changed lines around its loop.

    private = privatize(model, optimizer, plan, clip_norm=1.0, batch_size=250)
    loss = private.step(loss_fn, x, y)            # instead of zero_grad, backward, step
    print(private.statement())                    # ε so far, with all its assumptions

Kairouz et al. 2021 (arXiv 2103.00039), Algorithm 1, for any correlated noise and any optimizer;
DP-SGD is the same call with `identity()` and a sampled participation. The model stays the user's
own object with its own names. State: model, optimizer, noise buffers, step, random state.

>>> import torch
>>> from noshuffle import Plan, SinglePass
>>> from noshuffle.noise import test_source
>>> from noshuffle.training import privatize
>>> plan = Plan.fit(SinglePass(steps=3), mechanism="tree", noise_multiplier=2.0)
>>> model = torch.nn.Linear(2, 1)
>>> private = privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan,
...                     clip_norm=1.0, batch_size=4, source=test_source(seed=1))
>>> loss = private.step(torch.nn.MSELoss(), torch.randn(4, 2), torch.randn(4, 1))
>>> private.steps_released, 0 < private.epsilon < plan.epsilon()
(1, True)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from noshuffle.clipping import ModelLoss
from noshuffle.clipping.batch import cuttable
from noshuffle.clipping.check import original
from noshuffle.clipping.inputs import UNCOMPILED
from noshuffle.clipping.objective import Criterion
from noshuffle.errors import InvalidInput, Unsupported
from noshuffle.one_owner import OneOwner
from noshuffle.plan import Plan
from noshuffle.release import checkpoint
from noshuffle.release.folder import Keys, RunFolder
from noshuffle.release.ledger import Ledger
from noshuffle.release.sampler import Sampler, make_sampler
from noshuffle.release.spending import ADAPTIVE_CLIP, FACTS, notes_of, spent
from noshuffle.statement import PrivacyStatement
from noshuffle.training import parameter_guard as held
from noshuffle.training.compiled import Compiled
from noshuffle.training.compiled.result import Pending
from noshuffle.training.step import Outcome, Parts, Step
from noshuffle.training.unchanged import Listener, PrivateOptimizer


class Private(OneOwner):
    """A model in private training. Build it with `privatize`."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        parts: Parts,
        *,
        keys: Keys,
        run: RunFolder | None,
        loss_reduction: str,
    ) -> None:
        self.model = model
        self.plan = plan
        self.run = run
        self._outcome: Outcome | Pending | None = None
        self._parts = parts
        self._keys = keys
        self._loss_reduction = loss_reduction
        self._attached: dict[str, Any] = {}
        self._optimizer: PrivateOptimizer | None = None
        self._listener = self._listen()
        self._let_go = held.guard(parts.optimizer, self)
        self._index = 0
        self.compiled: Compiled | None = None
        self.not_compiled = ""
        self.ancestors = run.ancestors() if run is not None else ()

    @property
    def steps_done(self) -> int:
        """Index of the next step of this process (smaller than `steps_released` in a replay)."""
        return self._index

    @property
    def steps_released(self) -> int:
        """How many steps the ledger holds: what the statement covers."""
        return self._parts.ledger.released

    @property
    def why(self) -> str:
        """How a step is computed, and the reasons."""
        how = f"not compiled: {self.not_compiled}" if self.compiled is None else self.compiled.why
        return "; ".join(part for part in (getattr(self._parts.engine, "why", ""), how) if part)

    @property
    def fallbacks(self) -> list[str]:
        """What could not be done the fast way, each said once."""
        notes = list(getattr(self._parts.engine, "fallbacks", ()))
        if self.model is not self._parts.model and UNCOMPILED not in notes:
            notes.append(UNCOMPILED)
        return notes + (self.compiled.fallbacks if self.compiled is not None else [])

    @property
    def outcome(self) -> Outcome | None:
        """What the last step saw; raw data."""
        if isinstance(self._outcome, Pending):
            self._outcome = self._outcome.read()
        return self._outcome

    @property
    def ledger(self) -> Ledger:
        """The evidence."""
        return self._parts.ledger

    def step(self, loss_fn: Criterion | ModelLoss, *batch: Any, ids: Any = None) -> float:
        """One private step: guard, clip, sum, record, noise, divide, update.

        `ids` names the unit of every example. Without it, batches are told apart by content.
        Returns the mean loss of the batch, which is raw data and not private: look at it, but
        publish only what the statement covers.
        """
        self.advance(loss_fn, batch, ids=ids)
        if isinstance(self._outcome, Pending):
            return self._outcome.loss()
        assert self._outcome is not None
        return self._outcome.loss

    def advance(
        self, loss_fn: Criterion | ModelLoss, batch: tuple[Any, ...], *, ids: Any = None
    ) -> None:
        """The same step without waiting for its loss, which `outcome` has until the next one."""
        self._outcome = None
        step: Step | Pending | None = None
        if self.compiled is not None:
            batch = cuttable(batch)
            quiet = self._engine_at_work
            with held.at_work(self._parts.optimizer):
                step = self.compiled.step(loss_fn, batch, ids, index=self._index, at_work=quiet)
        if step is None:
            step = self._new_step()
            with self._engine_at_work():
                step.add(loss_fn, batch, ids=ids, is_last=True)
        self._finish(step)

    @contextmanager
    def accumulate(self) -> Iterator[Step]:
        """Several parts of one batch, one release at the end of the block:

        with private.accumulate() as step:
            for x, y in parts:
                step.add(loss_fn, (x, y))
        """
        step = self._new_step()
        with self._engine_at_work():
            yield step
        self._finish(step)

    def _new_step(self) -> Step:
        return Step(self._parts, index=self._index)

    def _finish(self, step: Step | Pending) -> None:
        if self._listener is not None:
            self._listener.clear()
        if isinstance(step, Pending):
            self._outcome = step
        else:
            with held.at_work(self._parts.optimizer):
                self._outcome = step.release()
        self._index += 1
        self.ledger.settle()  # a device is at work on the step meanwhile

    def _listen(self) -> Listener | None:
        """Hear the passes of an unchanged loop from the first one on; a compiled model is mute."""
        if hasattr(self.model, "_orig_mod"):
            return None
        return Listener(self.model, is_mean=self._loss_reduction == "mean")

    def _engine_at_work(self) -> AbstractContextManager[None]:
        return nullcontext() if self._listener is None else self._listener.paused()

    @property
    def optimizer(self) -> PrivateOptimizer:
        """For an unchanged loop: `loss.backward(); private.optimizer.step()`."""
        if self._listener is None:
            raise Unsupported(
                "a compiled model hides the layers from `loss.backward()`; use private.step, or "
                "privatize the model before torch.compile"
            )
        if self._optimizer is None:
            self._optimizer = PrivateOptimizer(
                self._parts, listener=self._listener, accumulate=self.accumulate
            )
        return self._optimizer

    def sampler(self, population: int | None = None) -> Sampler:
        """The secret sampler of a Poisson or fixed-size plan, from the current step on.

        It goes into a DataLoader as `batch_sampler`; pass its indices on as `ids`.
        """
        sampler = make_sampler(
            self.plan.participation, key=self._keys.sampling, population=population
        )
        self.ledger.bind("population", str(getattr(sampler, "population", "")))
        sampler.start = self._index
        self.ledger.sampler = sampler
        return sampler

    def statement(self) -> PrivacyStatement:
        """The guarantee of what was released so far, with all its assumptions."""
        notes = notes_of({name: self.ledger.meta(name) for name in FACTS})
        return spent(self.plan, self.steps_released, ancestors=self.ancestors, notes=notes)

    @property
    def epsilon(self) -> float:
        """ε so far; `statement()` says what it means."""
        return self.epsilon_after(self.steps_released)

    def epsilon_after(self, steps: int) -> float:
        """ε of the first `steps` steps of this run, and of the runs it was forked from."""
        is_adaptive = self._parts.threshold.is_adaptive
        if not self.ancestors and not is_adaptive:
            return self.plan.epsilon_after(steps)
        notes = (ADAPTIVE_CLIP,) if is_adaptive else ()
        return spent(self.plan, steps, ancestors=self.ancestors, notes=notes).epsilon

    def attach(self, **objects: Any) -> None:
        """Objects with `state_dict` (schedulers, averages) to be saved along, by name."""
        self._attached.update(objects)

    def state_dict(self) -> dict[str, Any]:
        """The whole state but the key."""
        state: dict[str, Any] = {
            "step": self._index,
            "plan": self.plan.hash,
            "key": self._keys.source.fingerprint,
            "batch_size": self._parts.planned_batch,
            "threshold": self._parts.threshold.state_dict(),
            "model": original(self.model).state_dict(),
            "optimizer": self._parts.optimizer.state_dict(),
            "noise": self._parts.noise.state_dict(),
            "attached": {name: item.state_dict() for name, item in self._attached.items()},
            "random": torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            state["random_cuda"] = torch.cuda.get_rng_state_all()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken; another plan, key or clipping is refused.

        Also sets torch's random state, which dropout draws from.
        """
        own = {
            "plan": self.plan.hash,
            "key": self._keys.source.fingerprint,
            "batch_size": self._parts.planned_batch,
        }
        for name, value in own.items():
            if state.get(name) != value:
                raise InvalidInput(
                    f"this state was saved with {name} = {state.get(name)}, the run has {value}; "
                    "build the run as it was, or fork it"
                )
        if set(state["attached"]) != set(self._attached):
            raise InvalidInput(
                f"this state was saved with attached objects {sorted(state['attached'])}, the run "
                f"has {sorted(self._attached)}; attach the same ones"
            )
        if int(state["step"]) > self.steps_released:
            raise InvalidInput(
                f"this state was taken after {state['step']} steps, the ledger knows of "
                f"{self.steps_released}; give privatize the run folder that saw them"
            )
        original(self.model).load_state_dict(state["model"])
        self._parts.optimizer.load_state_dict(state["optimizer"])
        self._parts.noise.load_state_dict(state["noise"])
        self._parts.threshold.load_state_dict(state["threshold"])
        for name, item in self._attached.items():
            item.load_state_dict(state["attached"][name])
        torch.set_rng_state(state["random"])
        if torch.cuda.is_available() and "random_cuda" in state:
            torch.cuda.set_rng_state_all(state["random_cuda"])
        self._index = int(state["step"])
        if isinstance(self.ledger.sampler, Sampler):
            self.ledger.sampler.start = self._index

    def save(self) -> Path:
        """Write a checkpoint and the statement into the run folder."""
        run = self._folder()
        path = checkpoint.save(self.state_dict(), run.checkpoints)
        self.ledger.tidy()
        self.write_statement()
        return path

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns the next step's index."""
        run = self._folder()
        found = checkpoint.saved(run.checkpoints)
        if found:
            self.load_state_dict(checkpoint.load(found[-1]))
        run.forget_metrics_after(self._index)
        return self._index

    def close(self) -> None:
        """Bring the evidence up to date and let go of the ledger."""
        self.write_statement()
        self.ledger.close()
        self._let_go()
        if self._listener is not None:
            self._listener.stop()

    def _folder(self) -> RunFolder:
        if self.run is None:
            raise InvalidInput("there is no run folder; give privatize run='runs/NAME'")
        return self.run

    def write_statement(self) -> None:
        """Bring statement.json up to date with the ledger, if there is a run folder."""
        if self.run is not None:
            self.run.write_statement(
                {
                    **self.statement().to_dict(),
                    "plan_hash": self.plan.hash,
                    "planned_steps": self.plan.steps,
                    "released_steps": self.steps_released,
                }
            )
