"""What README and docs have to name, and what they say errors say."""

import re
from pathlib import Path

import gymnasium as gym
import pytest
from trl import GRPOConfig

from agent_envs import ENVIRONMENTS, tool
from agent_envs.core.contexts import CONTEXTS
from agent_envs.envs.synthetic.world import VARIANTS
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.retrieval import RETRIEVERS
from agent_leaderboard.agents.agent import AGENTS
from agent_trainers import StepGRPOConfig
from agent_trainers.algorithms.advantages import ADVANTAGE_ESTIMATORS
from agent_trainers.cli.train import main
from agent_trainers.experimental.search.strategies import SEARCHES
from agent_trainers.trainers.presets import PRESETS

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCS = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
REWARD_TERMS = {name for spec in ENVIRONMENTS for name in gym.envs.registration.load_env_creator(
    spec.entry_point).reward_functions}  # fmt: skip
NAMES = [*CONTEXTS, *TOOL_FORMATS, *sorted(REWARD_TERMS), *VARIANTS, *RETRIEVERS, *AGENTS]
NAMES += [*ADVANTAGE_ESTIMATORS, *PRESETS, *SEARCHES]


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


def test_what_is_to_be_extended_takes_less_than_25_lines():
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        assert len([line for line in block.splitlines() if line.strip()]) < 25, block


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_name_everything_that_can_be_chosen(name):
    assert f"`{name}`" in DOCS or f'"{name}"' in DOCS


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES], ids=str)
def test_every_file_that_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:agent_\w+|benchmarks|docs|examples|tests)/[\w./-]*)`", text):
        assert (ROOT / path).exists() or (ROOT / "benchmarks" / path).exists(), path


def population(city):
    """Look up how many people live in a city."""


def rate(city: str) -> int: ...


def make(**kwargs):
    return lambda: gym.make("AgentR1/SyntheticMultiHop-v0", **kwargs)


def settings(**kwargs):
    return lambda: StepGRPOConfig("x", use_cpu=True, bf16=False, **kwargs)


def read_row_without_context():
    Path("bad.jsonl").write_text('{"question": "Who?"}\n', encoding="utf-8")
    gym.make("AgentR1/HotpotQA-v0", data="bad.jsonl").reset(seed=0)


def step_after_the_end():
    env = make()().unwrapped
    env.reset(seed=0)
    env.step(env.write_answer("x"))
    env.step("y")


ERRORS = {
    "an unknown id": lambda: gym.make("HotpotQA-v0"),
    "the hub": lambda: gym.make("AgentR1/HotpotQA-v0").reset(seed=0),
    "a malformed row": read_row_without_context,
    "an unknown reward": make(rewards={"exact_mach": 1}),
    "an unknown argument": make(hop=2),
    "a step after the end": step_after_the_end,
    "a step before reset": lambda: make()().step("x"),
    "a tool without a hint": lambda: tool(population),
    "a tool without a docstring": lambda: tool(name="population")(rate),
    "a setting that is refused": settings(loss_type="grpo"),
    "a setting that does nothing": settings(lam=0.9),
    "an estimator without its critic": settings(advantage_estimator="gae_step"),
    "TRL's reward weights": settings(reward_weights=[1.0]),
    "a batch that does not divide": settings(per_device_train_batch_size=6),
    "bf16 on a CPU": lambda: GRPOConfig("x"),
    "a mistyped option": lambda: main(["--learning_rat", "1"]),
    "JSON that is not valid": lambda: main(["--env_kwargs", "{hops: 2}"]),
    "no run to resume": lambda: main(["--resume", "--output_dir", "runs/nowhere"]),
    "FSDP on a CPU": lambda: main(["--num_processes", "2", "--accelerate_config", "fsdp2"]),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames what TRL still uses
@pytest.mark.parametrize("provoke", ERRORS.values(), ids=ERRORS)
def test_the_errors_of_the_page_say_what_the_page_says(provoke, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((Exception, SystemExit)) as caught:
        provoke()
    said = words(f"{caught.value} {capsys.readouterr().err}")
    assert any(message in said for message in shown_messages()), said


def shown_messages():
    """Yield every message of the page: its text blocks, and what it quotes in a sentence."""
    _, *parts = re.split(r"^```", TROUBLESHOOTING, flags=re.MULTILINE)
    blocks = [part.removeprefix("text\n") for part in parts[::2]]
    quoted = re.findall(r"`([^`]{20,})`", "".join(parts[1::2]))
    return map(words, [*blocks, *quoted])


def words(text):
    return " ".join(text.split())
