"""A small language model as a judge: attempts to instruct it do less than in a naive prompt."""

from pathlib import Path

import numpy as np
import pytest

from agent_envs.judges.rubric import load_rubric, write_prompt
from tests.agent_envs.judges.by_rules import RUBRIC
from tests.agent_envs.judges.injections import ANSWER, ATTEMPTS, QUESTION
from tests.agent_envs.judges.test_judge import naive_prompt

FOLDER = Path.home() / ".cache" / "agent-r1" / "models" / "smollm2"


def test_attempts_raise_the_score_of_a_small_model_less_than_in_a_naive_prompt():
    """Means of all 50 attempts were 0.72 against 1.24 points: such a model is easily persuaded."""
    if not FOLDER.is_dir():
        pytest.skip("SmolLM2 is not installed: python -m agent_trainers.small_models smollm2")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    rubric = load_rubric(RUBRIC)
    digits = [tokenizer.encode(str(score))[-1] for score in range(1, 6)]

    @torch.no_grad()
    def expected_score(messages):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text + '{"reason": "", "grounded": ', return_tensors="pt")
        logits = model(**ids, logits_to_keep=1).logits[0, -1, digits]
        return float(logits.double().softmax(0) @ torch.arange(1.0, 6.0, dtype=torch.float64))

    def ours(*texts):
        return expected_score(write_prompt(rubric, *texts))

    def naive(*texts):
        system = write_prompt(rubric, *texts)[0]
        return expected_score([system, *naive_prompt(*texts)])

    def shift(judge):
        clean = judge([QUESTION, "Nothing was found."], ["search", ANSWER])
        texts = [([QUESTION, "Nothing was found."], ["search", f"{a}{ANSWER}"]) for a in tried]
        return np.mean([judge(*each) for each in texts]) - clean

    tried = ATTEMPTS[:2]
    assert shift(ours) < 0.7 * shift(naive)
