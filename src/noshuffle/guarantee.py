"""The assumptions of a plan, each as one plain sentence.

A guarantee is read by people who did not write the code. Every sentence here is something that
somebody outside the mathematics must make true; a run folder repeats them word for word.

>>> from noshuffle.participation import SinglePass
>>> decisions = {"unit": "user", "neighbours": "zero-out", "accountant": "exact"}
>>> said = sentences(SinglePass(steps=9), noise_multiplier=1.0, is_exact=True, **decisions)
>>> said[0].partition(",")[0], len(said)
('Neighbouring data sets differ in one user', 6)
"""

from __future__ import annotations

from noshuffle.participation import FixedSize, Participation, Poisson, Restarted

_NEIGHBOURS = {
    "zero-out": "Neighbouring data sets differ in one {unit}, whose contributions become zero; "
    "everybody else's steps stay as they are.",
    "add-remove": "Neighbouring data sets differ by adding or removing one {unit}; "
    "everybody else's steps stay as they are.",
    "replace-one": "Neighbouring data sets differ in one {unit}, which is replaced by any other.",
}


def sentences(
    participation: Participation,
    *,
    unit: str,
    neighbours: str,
    noise_multiplier: float,
    is_exact: bool,
    accountant: str,
) -> tuple[str, ...]:
    """Every assumption behind a plan's statement; `is_exact` is said of the sensitivity."""
    out = [_NEIGHBOURS[neighbours].format(unit=unit)]
    out.append(_order(participation))
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
    if isinstance(participation, Poisson) and neighbours == "replace-one":
        out.append(
            "Among all replacements under Poisson sampling, opposite gradients are taken to be the "
            "worst; other libraries do the same, but no proof is known to us."
        )
    if noise_multiplier == 0:
        out.append("There is no noise, hence no privacy.")
    if not is_exact:
        out.append("The sensitivity is an upper bound, so the true ε is at most the stated one.")
    if accountant == "rdp":
        out.append("ε comes from a Rényi-divergence bound, which is above the true value.")
    if accountant == "fourier":
        out.append("ε is a rigorous upper bound from a discretised privacy-loss distribution.")
    return tuple(out)


def so_far(released: int, steps: int) -> str:
    """What a statement of an unfinished run adds."""
    return f"So far {released} of {steps} planned steps were released."


def _order(part: Participation) -> str:
    words = part.words()
    words = words[0].upper() + words[1:]
    if isinstance(part, Poisson | FixedSize):
        return f"{words}; the draw is uniform, kept secret, and made by nobody who knows the data."
    if isinstance(part, Restarted):
        return f"{words}; the order itself may be known to the attacker, and need not be random."
    return f"{words}; the order may be chosen by anybody and known to the attacker."
