"""From trajectories to tensors: rows, collation, micro-batches, shared prefixes."""
