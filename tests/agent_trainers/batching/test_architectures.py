"""Every architecture trains as with one row per step and no padding, or is refused by name."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.trainer.utils import add_fused_lm_head

from agent_envs.errors import ConfigurationError
from agent_trainers.batching.collate import collate
from agent_trainers.batching.micro_batch import select_rows
from agent_trainers.batching.probe import drops_out, supports
from agent_trainers.batching.rows import make_rows
from agent_trainers.batching.shared_prefix import (
    can_share,
    check_rows,
    find_groups,
    forward_rows,
    forward_shared,
    shares_rightly,
)
from agent_trainers.policies.local import context_length, has_slots_for
from agent_trainers.policies.sampling import SamplingSettings, sample
from agent_trainers.policies.slots import can_serve
from tests.agent_trainers.gradients import assert_close
from tests.agent_trainers.made import trajectory, transition

V = 64
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip
MODELS = {
    "absolute, tied": ("gpt2", GPT),
    "absolute, untied": ("gpt2", GPT | {"tie_word_embeddings": False}),
    "absolute, multi-query": ("gpt_bigcode", GPT | {"multi_query": True}),
    "absolute, local attention": ("gpt_neo", {
        "hidden_size": 16, "num_layers": 2, "num_heads": 2, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], "window_size": 4,
    }),
    "absolute, counted by the mask": ("opt", SIZES | {"ffn_dim": 32, "word_embed_proj_dim": 16}),
    "absolute, scaled embeddings": ("biogpt", SIZES),
    "sinusoidal": ("xglm", {
        "d_model": 16, "ffn_dim": 32, "num_layers": 2, "attention_heads": 2,
        "max_position_embeddings": 64,
    }),
    "ALiBi": ("bloom", {"hidden_size": 16, "n_layer": 2, "n_head": 2}),
    "ALiBi or rotary: ALiBi": ("falcon", SIZES | {"alibi": True}),
    "ALiBi or rotary: rotary": ("falcon", SIZES),
    "ALiBi, no position ids": ("mpt", {"d_model": 16, "n_layers": 2, "n_heads": 2}),
    "rotary, tied": ("qwen2", SIZES | {"tie_word_embeddings": True}),
    "rotary, untied": ("llama", SIZES),
    "rotary, partial": ("gpt_neox", SIZES),
    "longrope": ("phi3", SIZES | {
        "rope_parameters": LONGROPE, "original_max_position_embeddings": 32,
    }),
    "sliding window": ("mistral", SIZES | {"sliding_window": 4}),
    "sliding window in some layers": ("gemma2", SIZES | {"head_dim": 8, "sliding_window": 4}),
    "attention sinks, mixture": ("gpt_oss", SIZES | EXPERTS | {
        "head_dim": 8, "num_local_experts": 4, "sliding_window": 4,
    }),
    "mixture": ("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixture, shared expert": ("qwen2_moe", SIZES | EXPERTS | {
        "num_experts": 4, "shared_expert_intermediate_size": 16,
    }),
    "scaled logits": ("cohere", SIZES),
    "state space": ("mamba", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4}),
    "state space and convolution": ("falcon_mamba", {
        "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4,
    }),
    "convolution and attention": ("lfm2", SIZES | {"layer_types": ["conv", "full_attention"]}),
}  # fmt: skip
UNPADDED = {
    "decoder of an encoder-decoder": ("bart", {
        "d_model": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 32,
        "max_position_embeddings": 64,
    }),
    "recurrence without a mask": ("rwkv", {
        "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2,
    }),
}  # fmt: skip
REFUSED = {
    "attends to later tokens": ("bert-generation", SIZES),
    "head with a layer of its own": ("bert", SIZES | {"is_decoder": True}),
    "decoder with such a head": ("modernbert-decoder", SIZES | {"pad_token_id": 0}),
}  # fmt: skip


def make_model(kind, settings, std=0.3, **changes):
    torch.manual_seed(0)
    ids = {"vocab_size": V, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **(ids | settings | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():  # those of a new model hardly tell positions apart
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=std)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def episodes():
    """Two steps each: groups of two with the same first state, of different lengths."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(3, V, n).tolist()  # noqa: E731
    played = []
    for prompt in (draw(11), draw(6)):
        for first, between, last in ((3, 2, 4), (5, 1, 2)):
            one = transition(prompt, draw(first))
            state = [*prompt, *one.completion_ids, *draw(between)]
            played.append(trajectory(one, transition(state, draw(last))))
    return played


def alone(model, prompt, completion):
    """Log-probabilities of a completion, by a row without padding, mask and cache."""
    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0]
    scores = logits.log_softmax(dim=-1)[len(prompt) - 1 : -1]
    return scores.gather(1, torch.tensor(completion)[:, None])[:, 0]


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])


@pytest.mark.parametrize("name", MODELS)
def test_merged_padded_rows_with_shared_prompts_give_the_gradient_of_one_row_per_step(name):
    model = make_model(*MODELS[name])
    steps = [step for episode in episodes() for step in episode.transitions]
    losses = [alone(model, s.prompt_ids, s.completion_ids) for s in steps]
    weights = torch.linspace(-1, 1, sum(map(len, losses)))
    expected = gradient(model, torch.cat(losses) @ weights)

    check_rows(model, 1.0)
    rows = [row for i, episode in enumerate(episodes()) for row in make_rows(episode, i)]
    assert len(rows) == 4
    batch = select_rows(collate(rows, 0), range(4))
    found = [forward_rows(model, batch)]
    if can_share(model) and supports(model, lambda p: shares_rightly(p, model.base_model)):
        groups = find_groups(batch["prompt_ids"], batch["prompt_mask"], 1)
        assert len(groups.firsts) == 2
        found.append(forward_shared(model, model.base_model, batch, groups))
    trained = batch["tool_mask"].bool()
    for scores in found:
        assert_close(gradient(model, scores.logprobs[trained] @ weights), expected)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_sampled_with_the_log_probabilities_of_a_row_alone(name):
    model = make_model(*MODELS[name])
    settings = SamplingSettings(max_new_tokens=4, eos_token_ids=(), temperature=0.0)
    prompts = [episode.transitions[0].prompt_ids for episode in episodes()[1:3]]
    for prompt, turn in zip(prompts, sample(model, prompts, [], settings), strict=True):
        expected = alone(model, prompt, turn.token_ids).detach()
        assert_close(torch.tensor(turn.logprobs), expected)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("std", [0.3, 0.02])  # the latter is that of new models
def test_a_model_with_wrong_scores_is_refused_by_name(name, std):
    model = make_model(*REFUSED[name], std=std)
    refusal = f"type '{model.config.model_type}' cannot be trained"
    for is_mixed in (False, True):
        mixed = torch.autocast("cpu", torch.bfloat16, enabled=is_mixed)
        with mixed, pytest.raises(ConfigurationError, match=refusal):
            check_rows(model, 1.0)


@pytest.mark.parametrize("name", UNPADDED)
def test_a_model_that_padding_changes_is_refused_by_name(name):
    model = make_model(*UNPADDED[name])
    with pytest.raises(ConfigurationError, match=f"'{model.config.model_type}' cannot be sampled"):
        has_slots_for(model, SamplingSettings(max_new_tokens=1, eos_token_ids=(0,)))


def test_fast_paths_are_for_models_that_they_suit():
    def fast(name):
        model = make_model(*MODELS[name])
        shares = can_share(model) and supports(model, lambda p: shares_rightly(p, model.base_model))
        return shares, can_serve(model, settings)

    settings = SamplingSettings(max_new_tokens=1, eos_token_ids=(0,))
    assert {name: fast(name) for name in (
        "rotary, tied", "mixture", "absolute, tied", "ALiBi or rotary: ALiBi", "longrope",
        "sliding window", "state space",
    )} == {
        "rotary, tied": (True, True), "mixture": (True, True), "absolute, tied": (True, False),
        "ALiBi or rotary: ALiBi": (True, False), "longrope": (False, False),
        "sliding window": (False, False), "state space": (False, False),
    }  # fmt: skip


def test_states_stay_below_the_length_at_which_longrope_changes_the_whole_batch():
    assert context_length(make_model(*MODELS["longrope"])) == 32


@pytest.mark.parametrize(("kind", "settings"), [
    ("bloom", {"attention_dropout": 0.1}),  # a module
    ("llama", {"attention_dropout": 0.1}),  # a number
    ("opt", {"dropout": 0.1}),
    ("falcon", {"hidden_dropout": 0.1}),
    ("gpt2", {"resid_pdrop": 0.1}),
])  # fmt: skip
def test_dropout_is_found_as_a_module_and_as_a_number(kind, settings):
    without = {
        "bloom": {"hidden_dropout": 0.0},
        "gpt2": {"embd_pdrop": 0.0, "attn_pdrop": 0.0},
    }.get(kind, {})
    sizes = next(sizes for other, sizes in MODELS.values() if other == kind)
    off = dict.fromkeys(settings, 0.0)
    assert drops_out(make_model(kind, sizes | without, **settings))
    assert not drops_out(make_model(kind, sizes | without, **off))
