"""A second opinion on every guarantee, from what is emitted instead of from closed forms.

    emitted     the matrix of a noise stream, by unit draws
    worst       the largest shift that one unit can make (directions: `signs`)
    prefixes    ε of every stopping point beside the statement
    covariance  the law of noise that left, over many coordinates
    curve       ε of μ, by bisection

Nothing here imports `strategies.sensitivity` or `accounting`: what is checked and what checks it
share no formula.
"""
