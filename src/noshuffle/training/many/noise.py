"""The noise of K runs, central or federated: each under its own key, one pass per strategy.

    sums_k ← u_k·(sums_k/u_k + row t of C_k⁻¹Z_k),        u_k = z_k·ζ_k

A run's noise is that of the stream which `privatize` would make from the key of that run, so a run
of a study can be trained again alone, with the same numbers: up to the rounding of noisy values,
which lies on a grid of 2⁻¹⁰ of the noise, and is here the grid of u_k times that of noise of size
one (the same where u_k is a power of two). A run without noise is left as it is.

Run k of a study has the key BLAKE2b("run k"; key of the study), unless keys are given. Names that
derive one seed are refused, hence two runs under one key are. State: one `NoiseStream` a strategy.

>>> from noshuffle.noise import test_source
>>> a, b = (run_source(test_source(seed=1), run=k) for k in (0, 1))
>>> a.fingerprint == b.fingerprint, a.is_test
(False, True)
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from noshuffle.errors import InvalidInput, instance_of
from noshuffle.noise import NoiseStream, Source, new_key
from noshuffle.strategies import Strategy
from noshuffle.training.many.setting import wide


def run_source(source: Source, *, run: int) -> Source:
    """The source of one run of a study."""
    return source.derived(f"run {run}".encode(), person=b"noshuffle:run")


def sources_of(source: Source | Sequence[Source] | None, *, runs: int) -> tuple[Source, ...]:
    """One source a run: those that were given, or derived from one."""
    if source is None or isinstance(source, Source):
        common = source or Source(key=new_key())
        return tuple(run_source(common, run=k) for k in range(runs))
    instance_of(Sequence, source=source)
    if len(source) != runs:
        raise InvalidInput(f"give one source for each of the {runs} runs, got {len(source)}")
    for run, own in enumerate(source):
        instance_of(Source, **{f"the source of run {run}": own})
    return tuple(source)


@dataclass(frozen=True)
class RunSources(Source):
    """The sources of several runs as one: the tensor "k/name" has run k's stream of that name."""

    runs: tuple[Source, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[Source]) -> RunSources:
        first = runs[0]
        is_test = any(own.is_test for own in runs)
        if len({tuple(row for row, _ in own.later) for own in runs}) > 1:
            raise InvalidInput("the runs of a study must take fresh keys at the same rows")
        return cls(first.key, first.kind, is_test, first.later, tuple(runs))

    @property
    def ring(self) -> tuple[tuple[int, str], ...]:
        """First rows, and public names of all keys that begin there."""
        rings = [own.ring for own in self.runs]
        names = ("".join(name for _, name in together).encode() for together in zip(*rings))
        hashes = (hashlib.blake2b(name, digest_size=16).hexdigest() for name in names)
        return tuple((row, own) for (row, _), own in zip(rings[0], hashes))

    def seed(self, name: str, segment: int = 0) -> bytes:
        """The seed of a tensor name under a key of its run."""
        run, _, own = name.partition("/")
        return self.runs[int(run)].seed(own, segment)

    def on(self, device: torch.device) -> RunSources:
        """The same with `auto` decided for a device."""
        return self.of([own.on(device) for own in self.runs])


class StudyNoise:
    """Adds to every run's sums the noise of its own setting.

    Guarantees: those of `NoiseStream`, for every run by itself; runs share no draw. The scale of a
    run is kept in the precision of its sums.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        shapes: Mapping[str, Sequence[int]],
        *,
        scales: Sequence[float],
        strategies: Sequence[Strategy],
        steps: int,
        device: torch.device,
    ) -> None:
        self._scale = torch.tensor([s or 1.0 for s in scales], dtype=torch.float64, device=device)
        self._streams: list[NoiseStream] = []
        self._tensors: list[list[tuple[str, int, str]]] = []
        groups: list[tuple[Strategy, list[int]]] = []
        for run in (k for k, scale in enumerate(scales) if scale > 0):
            own = next((runs for s, runs in groups if s == strategies[run]), None)
            if own is None:
                groups.append((strategies[run], [run]))
            else:
                own.append(run)
        source = RunSources.of(sources)
        if any(own.kind != source.kind for own in sources):
            source = RunSources.of([replace(own, kind=source.kind) for own in sources])
        source.on(device).check_names(f"{k}/" for k, scale in enumerate(scales) if scale > 0)
        for strategy, runs in groups:
            tensors = [(f"{run}/{name}", run, name) for run in runs for name in shapes]
            own_shapes = {full: tuple(shapes[name]) for full, _, name in tensors}
            recipe = strategy.recipe(steps)
            stream = NoiseStream(recipe, source, own_shapes, scale=1.0, steps=steps, device=device)
            self._streams.append(stream)
            self._tensors.append(tensors)

    @property
    def can_be_captured(self) -> bool:
        """Whether a CUDA graph can hold the noise."""
        return all(stream._fused is not None for stream in self._streams)

    @torch.no_grad()
    def add_(self, sums: Mapping[str, Tensor]) -> None:
        """Add the noise of this step to stacked sums, in place."""
        if not self._streams:
            return
        for value in sums.values():
            value.div_(wide(self._scale, value))
        for stream, values in self._views(sums):
            stream.add_(values)
        for value in sums.values():
            value.mul_(wide(self._scale, value))

    def prepare(self, sums: Mapping[str, Tensor]) -> None:
        """Make ready to capture `add_` on sums like these."""
        for stream, values in self._views(sums):
            stream.prepare(values, counts_itself=True)

    def announce(self) -> None:
        """Count the step of the next replay as released."""
        for stream in self._streams:
            stream.announce(counts_itself=True)

    def _views(self, sums: Mapping[str, Tensor]) -> list[tuple[NoiseStream, dict[str, Tensor]]]:
        return [
            (stream, {full: sums[name][run] for full, run, name in tensors})
            for stream, tensors in zip(self._streams, self._tensors)
        ]
