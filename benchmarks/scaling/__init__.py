"""What an optimiser step costs with more processes, turns, tokens of context and group members.

::

    python -m benchmarks.scaling --output benchmarks/results/scaling.json

measures small cases on this machine, and writes the table of ``docs/scaling.md``.
"""
