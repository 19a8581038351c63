"""Make the embedded policy, evaluate it, and save it with its model card."""

from pathlib import Path

from agent_envs.core.command_line import CommandLineParser
from agent_trainers import TINY_POLICY
from benchmarks.embedded_policy.make import make

parser = CommandLineParser(description=__doc__)
parser.add_argument("--output", type=Path, default=TINY_POLICY, help="folder to write")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()
make(options.output, options.seed)
