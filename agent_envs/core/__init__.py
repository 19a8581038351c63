"""Building blocks of environments: messages, tools, contexts, rewards, snapshots, vectors."""
