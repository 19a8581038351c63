"""How the weights of the embedded policy are made: ``python -m benchmarks.embedded_policy``."""
