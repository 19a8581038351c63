"""Search for good episodes within a budget of environment steps."""
