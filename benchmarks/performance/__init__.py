"""What things cost: each module is run with ``python -m`` and prints what it measured."""
