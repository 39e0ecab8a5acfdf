"""The assumptions of a plan, each as one plain sentence.

A guarantee is read by people who did not write the code. Every sentence here is something that
somebody outside the mathematics must make true; a run folder repeats them word for word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from noshuffle.participation import FixedSize, Poisson, Restarted

if TYPE_CHECKING:
    from noshuffle.plan import Plan

_NEIGHBOURS = {
    "zero-out": "Neighbouring data sets differ in one {unit}, whose contributions become zero; "
    "everybody else's steps stay as they are.",
    "add-remove": "Neighbouring data sets differ by adding or removing one {unit}; "
    "everybody else's steps stay as they are.",
    "replace-one": "Neighbouring data sets differ in one {unit}, which is replaced by any other.",
}


def sentences(plan: Plan) -> tuple[str, ...]:
    """Every assumption behind the plan's statement."""
    unit = plan.unit
    out = [_NEIGHBOURS[plan.neighbours].format(unit=unit)]
    out.append(_order(plan))
    out.append(
        f"The contribution of one {unit} to one step is clipped to the clip norm before it is "
        "summed, and the noisy sum is divided by a constant fixed beforehand."
    )
    out.append(
        "The noise key is drawn from the operating system, stays secret, and no row of noise is "
        "ever used for two different batches."
    )
    out.append(
        "Every released value is a function of the noisy sums alone: all intermediate models are "
        "covered; raw losses, raw norms and hyper-parameters tuned on the same data are not."
    )
    out.append("Noise is treated as real-valued; the rounding of floating point is not analysed.")
    if isinstance(plan.participation, Poisson) and plan.neighbours == "replace-one":
        out.append(
            "Among all replacements under Poisson sampling, opposite gradients are taken to be the "
            "worst; other libraries do the same, but no proof is known to us."
        )
    if plan.noise_multiplier == 0:
        out.append("There is no noise, hence no privacy.")
    if not plan.sensitivity.exact:
        out.append("The sensitivity is an upper bound, so the true ε is at most the stated one.")
    if plan.accountant == "rdp":
        out.append("ε comes from a Rényi-divergence bound, which is above the true value.")
    if plan.accountant == "fourier":
        out.append("ε is a rigorous upper bound from a discretised privacy-loss distribution.")
    return tuple(out)


def _order(plan: Plan) -> str:
    part = plan.participation
    words = part.words()
    words = words[0].upper() + words[1:]
    if isinstance(part, Poisson | FixedSize):
        return f"{words}; the draw is uniform, kept secret, and made by nobody who knows the data."
    if isinstance(part, Restarted):
        return f"{words}; the order itself may be known to the attacker, and need not be random."
    return f"{words}; the order may be chosen by anybody and known to the attacker."
