"""Environments on other machines: a server with OpenEnv's protocol, and its client.

``python -m agent_envs serve AgentR1/HotpotQA-v0`` starts a server. The environment
``AgentR1/Remote-v0`` runs on one or more of them. `protocol` describes the messages.
"""
