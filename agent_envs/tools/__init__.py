"""Tools that environments offer."""
