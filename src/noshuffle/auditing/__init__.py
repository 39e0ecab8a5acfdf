"""A second opinion on every guarantee, from what is emitted instead of from closed forms.

    emitted     the matrix of a noise stream, by unit draws
    worst       the largest shift that one unit can make
    prefixes    ε of every stopping point beside the statement
    canaries    known participation, orthogonal directions; training_run: in a real run
    one_run     what guesses about many coins prove; membership: losses of the final model
    run_folder  the statement of a finished run
    recorder    what other people's code releases; claim: a test of their ε
    curve       ε of μ, by bisection

Nothing here imports `strategies.sensitivity` or `accounting`: what is checked and what checks it
share no formula.
"""
