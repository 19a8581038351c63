"""The chance that at least one of k samples is right, or that all of them are."""

import math

from agent_envs.errors import ConfigurationError


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate pass@k without bias from `num_samples` samples of one task.

    ``1 - C(n - c, k) / C(n, k)`` (Chen et al., 2021, arXiv 2107.03374, section 2.1).

    Args:
        num_samples: n, samples drawn.
        num_correct: c, how many of them are right; 0 to n.
        k: How many a user would draw; 1 to n.
    """
    return 1.0 - pass_hat_k(num_samples, num_samples - num_correct, k)


def pass_hat_k(num_samples: int, num_correct: int, k: int) -> float:
    """Estimate pass^k, the chance that k samples of one task are all right, without bias.

    ``C(c, k) / C(n, k)`` (Yao et al., 2024, tau-bench, arXiv 2406.12045, section 3).
    """
    if not (0 <= num_correct <= num_samples and 1 <= k <= num_samples):
        raise ConfigurationError(
            f"k={k} of {num_samples} samples, {num_correct} of one kind, is not defined: it takes "
            "1 <= k <= num_samples and 0 <= num_correct <= num_samples."
        )
    return math.comb(num_correct, k) / math.comb(num_samples, k)
