"""Build the wheel, install it outside the repository, and try it as a user does.

``make test-wheel``: first the core alone, then with what training needs. Needs the network.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
CORE = """
import benchmarks, gymnasium as gym, agent_envs, agent_trainers, agent_leaderboard
assert benchmarks.__file__.startswith({folder!r}), benchmarks.__file__
assert agent_envs.__file__.startswith({folder!r}), agent_envs.__file__
env = gym.make("AgentR1/SyntheticMultiHop-v0")
env.reset(seed=0)
for action in env.unwrapped.reference_actions():
    *_, info = env.step(action)
assert info["metrics"]["success"] == 1.0
"""


def run(*command, exit_code=0, **options):
    """Run a command; show what it says if it ends otherwise."""
    result = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, check=False, **options
    )
    if result.returncode != exit_code:
        sys.exit(f"{command} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr


def build(folder):
    """Build the wheel of what is in the checkout, without what earlier builds left there."""
    listing = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listing.split("\0"):
        if name and (ROOT / name).is_file():
            target = folder / "source" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", folder, folder / "source")
    (wheel,) = folder.glob("*.whl")
    return wheel


def main():
    """Try it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        wheel = build(folder)
        run(sys.executable, "-m", "venv", folder / "venv")
        binaries = folder / "venv" / "bin"
        pip = (
            binaries / "python",
            "-m",
            "pip",
            "install",
            "--constraint",
            ROOT / "constraints.txt",
        )
        here = {"cwd": folder}  # where the user has a package named `benchmarks`
        (folder / "benchmarks").mkdir()
        (folder / "benchmarks" / "__init__.py").touch()

        run(*pip, wheel)
        run(binaries / "python", "-c", CORE.format(folder=str(folder)), **here)
        for command in COMMANDS:
            run(binaries / command, "--version", **here)
            for arguments in ([], ["--help"]):
                said = run(binaries / command, *arguments, exit_code=2, **here)
                assert said.endswith("pip install '.[train]'\n"), said
                assert len(said.splitlines()) == 1, said

        run(*pip, f"{wheel}[train]")
        run(binaries / "python", "-c", CORE.format(folder=str(folder)), **here)
        for command in COMMANDS:
            run(binaries / command, "--help", **here)
        run(
            binaries / "agent-r1-train", "--max_steps", "1", "--num_eval_tasks", "4",
            "--output_dir", "run", **here,
        )  # fmt: skip
        run(binaries / "agent-r1-eval", "--model", "run", "--num_tasks", "4", **here)
        run(
            binaries / "agent-r1-bench", "--environments", "synthetic-multi-hop", "--agents",
            "oracle", "--tasks", "3", "--output", "board", **here,
        )  # fmt: skip
        run(binaries / "agent-r1-bench", "verify", "board", **here)


if __name__ == "__main__":
    main()
