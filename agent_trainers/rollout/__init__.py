"""Playing episodes: the collector, one episode, evaluation."""
