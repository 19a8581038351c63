"""Environments on other machines: a server that speaks OpenEnv's protocol, and who plays it.

`serve` starts a server: ``python -m agent_envs.serve AgentR1/HotpotQA-v0``. The environment
``AgentR1/Remote-v0`` plays what one or more of them serve. What goes over the wire stands in
`protocol`.
"""
