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
    "get_started/install.md": "install, offline",
    "get_started/concepts.md": "observation space, action space, generalisation, multi-turn, "
    "deterministic",
    "tutorials/environment.ipynb": "custom environment",
    "howto/environments.md": "simulated user, initialise, reproducible",
    "get_started/first_run.md": "instantiate",
    "tutorials/language_model.ipynb": "fine-tuning, SFT, zero-shot",
    "howto/language_models.md": "rejection sampling, demonstrations, reasoning, learning rate",
    "howto/programs.md": "LangGraph, OpenAI, multi-agent",
    "tutorials/read_a_run.ipynb": "trajectories, tensorboard, wandb",
    "howto/tools.md": "function calling, MCP",
    "howto/contexts.md": "summary, context window",
    "howto/scale.md": "memory, LoRA, quantisation, multi-GPU, FSDP, vLLM, inference",
    "howto/data.md": "dataset, retrieval, RAG, prompt injection",
    "howto/sandbox.md": "sandbox, docker",
    "howto/search.md": "tree search, best-of-n, value function, overfitting",
    "howto/mixtures.md": "curriculum, dynamic sampling",
    "howto/resume.md": "checkpoint, interrupt",
    "howto/evaluate.md": "pass@k, confidence interval, greedy decoding",
    "howto/reward_models.md": "reward model",
    "howto/remote.md": "latency, authentication, Ray",
    "howto/libraries.md": "verifiers, Stable-Baselines3, vector environments",
    "howto/leaderboard.md": "benchmark",
    "howto/extend.md": "callback, reward term",
    "howto/troubleshoot.md": "out of memory",
    "reference/configuration.md": "hyperparameters, command line",
    "reference/metrics.md": "entropy, throughput",
    "reference/formats.md": "tool format",
    "reference/protocols.md": "gateway",
    "reference/files.md": "file formats",
    "explanation/algorithms.md": "credit assignment, GAE, GRPO, critic",
    "explanation/rewards.md": "reward hacking, reward shaping",
    "explanation/tokens.md": "chat template, importance weights",
    "explanation/security.md": "threat model, adversarial",
    "explanation/design.md": "architecture",
    "project/versions.md": "reproducibility, semantic versioning",
}


def parts(text):
    """Return title, headings and everything."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    title, *headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return title, "\n".join(headings), " ".join(text.split())


PARTS = {name: parts(text) for name, text in PAGES.items()}


def score(term, texts):
    """Return how often a page has the term; its title counts 20 times, a heading 8 times."""
    found = re.compile(rf"\b{re.escape(term)}", re.IGNORECASE)
    return sum(n * len(found.findall(t)) for n, t in zip((20, 8, 1), texts, strict=True))


@pytest.mark.parametrize(
    ("term", "page"), [(term, page) for page in TERMS for term in TERMS[page].split(", ")]
)
def test_a_search_for_a_term_finds_its_page(term, page):
    scores = {name: score(term, texts) for name, texts in PARTS.items()}
    first = sorted(scores, key=lambda name: -scores[name])[:3]
    assert scores[page] > 0, "no such word"
    assert scores[page] >= scores[first[-1]], first
