"""A stand-in for the package vllm: what the policy uses of its documented interface."""

import sys
import types
from types import SimpleNamespace

from transformers import AutoTokenizer

from agent_trainers import TINY_POLICY

TOKENIZER = AutoTokenizer.from_pretrained(TINY_POLICY)
WORDS = TOKENIZER("<answer>", add_special_tokens=False).input_ids


class LLM:
    """Says the same to everything; the second prompt's turn is cut off."""

    calls = []  # noqa: RUF012 - emptied by the fixture

    def __init__(self, model, max_model_len):
        self.model, self.max_model_len = model, max_model_len

    def generate(self, prompts, sampling_params, *, use_tqdm):
        self.calls.append((prompts, sampling_params))
        outputs = []
        for i in range(len(prompts)):
            ids = (*WORDS, TOKENIZER.eos_token_id) if i != 1 else tuple(WORDS)
            logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in ids]
            reason = "stop" if i != 1 else "length"
            output = SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=reason)
            outputs.append(SimpleNamespace(outputs=[output]))
        return outputs


def install_vllm(monkeypatch):
    """Put the stand-in in the package's place; return its engine, which remembers its calls."""
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SimpleNamespace
    module.__spec__ = SimpleNamespace(name="vllm")
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(LLM, "calls", [])
    return LLM
