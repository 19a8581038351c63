"""Rollouts: many episodes against one policy, evaluation, and demonstrations."""
