"""Mathematics and reasoning."""
