"""Training of language models in `agent_envs` environments, on top of TRL."""
