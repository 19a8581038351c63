"""How right is credit? True advantages by branching, and every estimator scored against them."""
