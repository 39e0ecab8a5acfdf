"""`noshuffle epsilon`: one number and every assumption behind it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from noshuffle.cli import options as o


def epsilon(
    mechanism: o.Mechanism = "blt",
    variant: o.Variant = "honaker",
    steps: o.Steps = None,
    epochs: o.EpochCount = None,
    steps_per_epoch: o.StepsPerEpoch = None,
    separation: o.Separation = None,
    max_participations: o.MaxParticipations = None,
    restart_every: o.RestartEvery = None,
    completion: o.Completion = False,
    bands: Annotated[int | None, typer.Option(help="bands of banded mechanisms")] = None,
    buffers: Annotated[int | None, typer.Option(help="buffers of a BLT")] = None,
    taps: Annotated[int | None, typer.Option(help="epoch taps of a BLT")] = None,
    poisson_rate: o.PoissonRate = None,
    population: o.Population = None,
    batch_size: o.BatchSize = None,
    noise_multiplier: o.NoiseMultiplier = None,
    target_epsilon: o.TargetEpsilon = None,
    delta: o.Delta = 1e-5,
    neighbours: o.Neighbours = "",
    unit: o.Unit = "example",
    accountant: o.Accountant = "",
    json: o.Json = False,
) -> None:
    """Epsilon of a run (or the noise for a target epsilon), with its assumptions.

    For example: noshuffle epsilon --steps 1600 --mechanism tree --noise-multiplier 1.13
    """
    from noshuffle.errors import InvalidInput, positive
    from noshuffle.plan import Plan
    from noshuffle.strategies import tree

    if (noise_multiplier is None) == (target_epsilon is None):
        raise InvalidInput("give exactly one of --noise-multiplier and --target-epsilon")
    if noise_multiplier is not None:
        positive(noise_multiplier=noise_multiplier)
    participation = o.build_participation(
        steps=steps,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        separation=separation,
        max_participations=max_participations,
        poisson_rate=poisson_rate,
        population=population,
        batch_size=batch_size,
    )
    every = o.restart_steps(restart_every, participation)
    if mechanism != "tree" and (every is not None or completion):
        raise InvalidInput("--restart-every and --completion belong to --mechanism tree")
    for option, value, families in (
        ("--variant", variant != "honaker", ("tree",)),
        ("--bands", bands, ("bsr", "bisr", "banded", "banded_inverse")),
        ("--taps", taps, ("blt_tapped", "blt_gains", "blt_two_sided")),
    ):
        if value and mechanism not in families:
            raise InvalidInput(f"{option} belongs to {', '.join(families)}; got {mechanism}")
    chosen: Any = mechanism
    settings: dict[str, Any] = {}
    if mechanism == "tree":
        chosen = tree(variant, restart_every=every, completion=completion)
        participation = o.with_restarts(participation, every)
    else:
        settings = {"bands": bands, "buffers": buffers, "taps": taps}
        settings = {name: value for name, value in settings.items() if value is not None}
        gap = getattr(participation, "separation", getattr(participation, "steps_per_epoch", None))
        if mechanism == "banded" and bands and gap and participation.most > 1 and bands > gap:
            raise InvalidInput(
                f"--bands must be at most the separation ({gap}), so that the columns of one unit "
                f"are orthogonal; got {bands}"
            )
    plan = Plan.fit(
        participation,
        mechanism=chosen,
        epsilon=target_epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        neighbours=neighbours,
        unit=unit,
        accountant=accountant,
        **settings,
    )
    _print(plan, as_json=json)


def _print(plan: Any, *, as_json: bool) -> None:
    import json

    statement = plan.statement()
    if as_json:
        record = statement.to_dict()
        record["strategy"] = plan.strategy.name
        record["plan_hash"] = plan.hash
        print(json.dumps(record, indent=2, ensure_ascii=False))
    else:
        print(statement.words())
