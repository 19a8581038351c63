"""Guided decoding with a small random model whose tokens are bytes."""

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_envs import ConfigurationError
from agent_trainers import Gateway
from agent_trainers.policies.local import transformers_policy
from tests.agent_trainers.gateway.programs import FORM, SCHEMA, TOOL, client_of
from tests.agent_trainers.made import request

USER = [{"role": "user", "content": "hello"}]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
OTHER = {"type": "function", "function": {"name": "drop", "parameters": SCHEMA}}


@pytest.fixture(scope="module")
def policies():
    """The same policy, which generates in slots and in batches."""
    pytest.importorskip("xgrammar", reason="the extra 'guided' is not installed")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={x: i for i, x in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|im_end|>",
        extra_special_tokens={"start": "<|im_start|>"}, chat_template=TEMPLATE,
    )  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=2048, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    options = {"max_new_tokens": 400, "temperature": 1.0}
    both = [transformers_policy(LlamaForCausalLM(config), tokenizer, **options) for _ in range(2)]
    both[1]._complete, both[1]._guides = both[0]._complete, both[0]._guides
    both[1]._slot_model = None
    return both


@pytest.fixture(params=[0, 1], ids=["slots", "batches"])
def complete(request, policies):
    """Ask a gateway on the policy for a turn."""
    with Gateway(policies[request.param]) as gateway:
        session = gateway.open(task_id="0")

        def ask(**options):
            client = client_of(session)
            reply = client.chat.completions.create(model="any", messages=USER, **options)
            return reply.choices[0]

        ask.session = session
        yield ask


def test_an_answer_follows_its_schema(complete):
    choice = complete(response_format=FORM)
    assert choice.finish_reason == "stop"
    assert json.loads(choice.message.content)["city"] in ("Oslo", "Rome")


def test_a_required_call_is_made(complete):
    choice = complete(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "add")
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")


def test_a_named_function_is_called(complete):
    named = {"type": "function", "function": {"name": "drop"}}
    (call,) = complete(tools=[TOOL, OTHER], tool_choice=named).message.tool_calls
    assert call.function.name == "drop"


def test_with_a_schema_and_tools_the_model_answers_or_calls(complete):
    message = complete(tools=[TOOL], response_format=FORM).message
    assert message.tool_calls or json.loads(message.content)


def test_a_schema_that_cannot_be_followed_is_refused(policies):
    form = {"type": "json_schema", "json_schema": {"type": "nothing"}}
    with pytest.raises(ConfigurationError, match='Unsupported type "nothing"'):
        policies[0].check_guide({"type": "structural_tag", "format": form})


def test_log_probabilities_are_those_of_the_free_policy(complete, policies):
    complete(response_format=FORM)
    (step,) = complete.session.close(1.0).transitions
    prompt = policies[0].encode(request(messages=USER))
    model = policies[0]._slot_model().__enter__()
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *step.completion_ids]])).logits[0].double()
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    expected = logprobs.gather(1, torch.tensor(step.completion_ids)[:, None]).squeeze(1)
    np.testing.assert_allclose(step.logprobs, expected, rtol=1e-4)
    assert step.logprobs.max() < 0  # forced tokens, too
