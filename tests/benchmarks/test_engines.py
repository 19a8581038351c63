"""The replacements of CUDA and of rewards in TRL's asynchronous trainer give the same numbers."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from agent_envs.adapters.own_episode import OwnEpisode
from benchmarks.performance import engines
from benchmarks.performance.models import ENVIRONMENT, SHAPES, model_config


def test_attention_along_a_tree_is_that_of_each_sample(monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    packing = pytest.importorskip("trl.experimental.async_grpo.packing")
    monkeypatch.setattr(packing, "_flash_attn", lambda: engines.PlainAttention)
    packing.register_tree_attention()
    torch.manual_seed(0)
    config = model_config(SHAPES["tiny"], 40, attn_implementation="eager")
    model = Qwen3ForCausalLM(config).eval()
    samples = [[1, 2, 3, 4, 5], [1, 2, 3, 6], [1, 2, 7, 8, 9, 10], [11, 12]]
    row = packing.TreeRow()
    for tokens in samples:
        ids = torch.tensor(tokens)
        row.add({
            "input_ids": ids, "completion_mask": torch.ones_like(ids), "group_id": 0,
            "old_log_probs": torch.zeros(len(ids)), "advantage": 0.0,
        })  # fmt: skip
    packed = row.pack()
    with torch.no_grad():
        alone = [model(torch.tensor([tokens])).logits[0] for tokens in samples]
        model.set_attn_implementation(packing.TREE_ATTENTION)
        longest, path = packed["tree_max_seqlens"].tolist()
        shared = {name: packed[name] for name in packed if name.startswith("tree_")}
        del shared["tree_max_seqlens"]
        logits = model(
            packed["input_ids"][None], position_ids=packed["position_ids"][None], use_cache=False,
            tree_max_seqlen_q=longest, tree_max_seqlen_k=path, **shared,
        ).logits[0]  # fmt: skip
    assert len(logits) < sum(map(len, samples))
    # each trained token is predicted from the position of its predecessor
    expected = torch.cat([one[:-1] for one in alone])
    torch.testing.assert_close(logits[packed["token_index"]], expected, rtol=1e-4, atol=1e-5)


def test_a_replayed_completion_has_the_return_of_its_episode():
    episode = OwnEpisode(ENVIRONMENT, {})
    episode.reset(seed=3, task=3)
    completion = []
    for action in episode.env.unwrapped.reference_actions():
        episode.step(action)
        message = {"role": "assistant", "content": action}
        if (done := episode.info["action"])["kind"] != "answer":
            message["tool_calls"] = [{"function": {k: done[k] for k in ("name", "arguments")}}]
        completion.append(message)
    expected = [pytest.approx(episode.episode_return)]
    assert expected == [pytest.approx(1.2)]  # two facts and the answer
    assert engines.replayed_return([completion], [3], [3]) == expected
    assert engines.replayed_return([completion[:1]], [3], [3]) != expected
