"""How the cost of an optimiser step grows with processes, turns, context and group size.

::

    python -m benchmarks.scaling --output benchmarks/results/scaling.json

measures small cases on this machine, fits a model with named terms, checks it on cases left out of
the fit, extrapolates it to GPUs under stated assumptions, and writes ``docs/scaling.md``.
"""
