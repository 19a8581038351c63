"""Tiny policies from nothing: the embedded one, or one for an environment of one's own.

``python -m agent_trainers.make_tiny_policy --env my_module:MyEnv-v0``
"""
