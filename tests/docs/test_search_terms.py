"""A search for a common term of the field finds the right page among the first three."""

import json
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {page.relative_to(DOCS).as_posix(): page.read_text("utf-8") for page in DOCS.rglob("*.md")}
for page in DOCS.rglob("*.ipynb"):
    cells = json.loads(page.read_text("utf-8"))["cells"]
    PAGES[page.relative_to(DOCS).as_posix()] = "\n\n".join(
        "".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"
    )
TERMS = {
    "install": "get_started/install.md",
    "offline": "get_started/install.md",
    "observation space": "get_started/concepts.md",
    "action space": "get_started/concepts.md",
    "generalisation": "get_started/concepts.md",
    "custom environment": "tutorials/environment.ipynb",
    "simulated user": "howto/environments.md",
    "instantiate": "get_started/first_run.md",
    "fine-tuning": "tutorials/language_model.ipynb",
    "SFT": "tutorials/language_model.ipynb",
    "zero-shot": "tutorials/language_model.ipynb",
    "rejection sampling": "howto/language_models.md",
    "demonstrations": "howto/language_models.md",
    "reasoning": "howto/language_models.md",
    "LangGraph": "howto/programs.md",
    "OpenAI": "howto/programs.md",
    "multi-agent": "howto/programs.md",
    "trajectories": "tutorials/read_a_run.ipynb",
    "tensorboard": "tutorials/read_a_run.ipynb",
    "wandb": "tutorials/read_a_run.ipynb",
    "function calling": "howto/tools.md",
    "MCP": "howto/tools.md",
    "summary": "howto/contexts.md",
    "memory": "howto/scale.md",
    "context window": "howto/contexts.md",
    "dataset": "howto/data.md",
    "retrieval": "howto/data.md",
    "RAG": "howto/data.md",
    "prompt injection": "howto/data.md",
    "sandbox": "howto/sandbox.md",
    "docker": "howto/sandbox.md",
    "tree search": "howto/search.md",
    "curriculum": "howto/mixtures.md",
    "dynamic sampling": "howto/mixtures.md",
    "LoRA": "howto/scale.md",
    "quantisation": "howto/scale.md",
    "multi-GPU": "howto/scale.md",
    "FSDP": "howto/scale.md",
    "vLLM": "howto/scale.md",
    "inference": "howto/scale.md",
    "checkpoint": "howto/resume.md",
    "interrupt": "howto/resume.md",
    "pass@k": "howto/evaluate.md",
    "confidence interval": "howto/evaluate.md",
    "greedy decoding": "howto/evaluate.md",
    "best-of-n": "howto/search.md",
    "reward model": "howto/reward_models.md",
    "value function": "howto/search.md",
    "overfitting": "howto/search.md",
    "latency": "howto/remote.md",
    "authentication": "howto/remote.md",
    "Ray": "howto/remote.md",
    "verifiers": "howto/libraries.md",
    "Stable-Baselines3": "howto/libraries.md",
    "vector environments": "howto/libraries.md",
    "benchmark": "howto/leaderboard.md",
    "callback": "howto/extend.md",
    "reward term": "howto/extend.md",
    "out of memory": "howto/troubleshoot.md",
    "learning rate": "howto/language_models.md",
    "hyperparameters": "reference/configuration.md",
    "command line": "reference/configuration.md",
    "entropy": "reference/metrics.md",
    "throughput": "reference/metrics.md",
    "tool format": "reference/formats.md",
    "gateway": "reference/protocols.md",
    "file formats": "reference/files.md",
    "credit assignment": "explanation/algorithms.md",
    "GAE": "explanation/algorithms.md",
    "GRPO": "explanation/algorithms.md",
    "critic": "explanation/algorithms.md",
    "reward hacking": "explanation/rewards.md",
    "reward shaping": "explanation/rewards.md",
    "multi-turn": "get_started/concepts.md",
    "chat template": "explanation/tokens.md",
    "importance weights": "explanation/tokens.md",
    "threat model": "explanation/security.md",
    "adversarial": "explanation/security.md",
    "architecture": "explanation/design.md",
    "deterministic": "get_started/concepts.md",
    "initialise": "howto/environments.md",
    "reproducible": "howto/environments.md",
    "reproducibility": "project/versions.md",
    "semantic versioning": "project/versions.md",
}


def score(term, text):
    """Return how often a page has the term; its title counts 20 times, a heading 8 times."""
    found = re.compile(rf"\b{re.escape(term)}", re.IGNORECASE)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    title, *headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    in_headings = sum(len(found.findall(heading)) for heading in headings)
    everywhere = len(found.findall(" ".join(text.split())))
    return 20 * len(found.findall(title)) + 8 * in_headings + everywhere


@pytest.mark.parametrize(("term", "page"), TERMS.items())
def test_a_search_for_a_term_finds_its_page(term, page):
    scores = {name: score(term, text) for name, text in PAGES.items()}
    first = sorted(scores, key=lambda name: -scores[name])[:3]
    assert scores[page] > 0, "no such word"
    assert scores[page] >= scores[first[-1]], first
