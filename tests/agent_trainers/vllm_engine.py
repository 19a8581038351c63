"""A stand-in for the package vllm: what the policy uses of its documented interface."""

import sys
import types
from dataclasses import dataclass

from transformers import AutoTokenizer

from agent_trainers import TINY_POLICY

TOKENIZER = AutoTokenizer.from_pretrained(TINY_POLICY)
WORDS = TOKENIZER("<answer>", add_special_tokens=False).input_ids


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    logprobs: int
    stop_token_ids: list


@dataclass
class Logprob:
    logprob: float


class LLM:
    """Says the same to everything; the second prompt's turn is cut off."""

    calls = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, model, max_model_len):
        self.model, self.max_model_len = model, max_model_len

    def generate(self, prompts, sampling_params, *, use_tqdm):
        self.calls.append((prompts, sampling_params))
        outputs = []
        for i in range(len(prompts)):
            ids = [*WORDS, TOKENIZER.eos_token_id] if i != 1 else list(WORDS)
            output = types.SimpleNamespace(
                token_ids=tuple(ids),
                logprobs=[{token: Logprob(-0.5)} for token in ids],
                finish_reason="stop" if i != 1 else "length",
            )
            outputs.append(types.SimpleNamespace(outputs=[output]))
        return outputs


def install_vllm(monkeypatch):
    """Put the stand-in in the package's place; return its engine, which remembers its calls."""
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    module.__spec__ = types.SimpleNamespace(name="vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "calls", [])
    return LLM
