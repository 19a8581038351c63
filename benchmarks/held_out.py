"""Generalisation of trained policies to unseen variants: ``python -m benchmarks.held_out FOLDER``.

Evaluates on the mixture that the default recipe trains on, in held-out worlds, and on the same with
one change: words, relations, hops, length of lists. Figures of several folders, such as runs with
other seeds, are averaged. Without a folder it evaluates the embedded policy.
"""

import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_leaderboard.report.visible_text import markdown_table
from agent_trainers import TINY_POLICY
from agent_trainers.cli.arguments import run_command
from agent_trainers.policies.local import load_policy
from agent_trainers.policies.policy import Policy
from agent_trainers.rollout.evaluation import evaluate_policy
from benchmarks.embedded_policy.make import mixture

PROGRAM: Final = "python -m benchmarks.held_out"
HELD_OUT: Final[Mapping[str, Mapping[str, Any]]] = {
    "paraphrase": {"variant": "paraphrase"},
    "relations": {"variant": "relations"},
    "four hops": {"hops": 4, "max_episode_steps": 5},
    "lists of 1": {"top_k": 1},
    "lists of 5": {"top_k": 5},
    "lists of 8": {"top_k": 8},
    "all of these": {
        "variant": ["paraphrase", "relations"], "hops": 4, "top_k": 8, "outdated": 1.0,
        "max_episode_steps": 5,
    },
}  # fmt: skip
"""Changes of the mixture's arguments."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    run_command(PROGRAM, _run, arguments)


def _run(arguments: Sequence[str]) -> None:
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=[str(TINY_POLICY)], help="folders of policies")
    parser.add_argument(
        "--num_tasks", type=positive_int, default=500, help="held-out tasks of each row"
    )
    options = parser.parse_args(arguments)
    policies = [load_policy(model) for model in options.models]
    sys.stdout.write(report(policies, options.num_tasks))


def report(policies: Sequence[Policy], num_tasks: int) -> str:
    """Return success in the mixture and in each variant, and the ratio, as a Markdown table."""
    success = {
        name: statistics.fmean(
            evaluate_policy(mixture(**changes), policy, range(num_tasks), seed=1).metrics["success"]
            for policy in policies
        )
        for name, changes in {"the mixture": {}, **HELD_OUT}.items()
    }
    in_domain = success["the mixture"]
    rows = [
        [name, f"{value:.1%}", f"{value / in_domain:.2f}" if in_domain else ""]
        for name, value in success.items()
    ]
    return markdown_table(["tasks", "success", "of the mixture's"], rows) + "\n"


if __name__ == "__main__":
    main()
