# ruff: noqa: RUF001 - DeepSeek writes its control tokens with full-width bars
from dataclasses import replace

import numpy as np
import pytest

from agent_envs import ConfigurationError
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.trajectory import Transition
from tests.agent_trainers.real_models import make_tokenizer

TEMPLATES = ["qwen2_5", "qwen3"]
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"name": "search", "description": "Search.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": SEARCH}]
STATE = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "Where is Oslo?"},
]
ACTION = '<tool_call>{"name": "search", "arguments": {"query": "Oslo"}}</tool_call>'
REPLY = {"role": "tool", "name": "search", "content": "[1] Oslo\nOslo is in Norway."}


@pytest.fixture(params=TEMPLATES)
def renderer(request):
    return ChatRenderer(make_tokenizer(request.param))


def acted(renderer, messages, tools, action=ACTION, previous=None):
    """The transition of a model that wrote `action` in a state."""
    prompt_ids = renderer.prompt_ids(messages, tools, previous)
    written = renderer.tokenizer(action + "<|im_end|>", add_special_tokens=False)
    completion_ids = written["input_ids"]
    return Transition(
        messages=messages, prompt_ids=prompt_ids, completion_ids=completion_ids,
        logprobs=np.zeros(len(completion_ids), np.float32), action=action, reward=0.0,
        reward_terms={}, terminated=False, truncated=False, info={},
    )  # fmt: skip


def test_what_is_added_is_what_the_template_would_have_written():
    # Qwen2.5's template keeps earlier turns as they are, so both ways must agree to the letter.
    renderer = ChatRenderer(make_tokenizer("qwen2_5"))
    messages, previous = list(STATE), None
    for _ in range(3):
        previous = acted(renderer, messages, TOOLS, previous=previous)
        messages = [*messages, {"role": "assistant", "content": ACTION}, REPLY]
        ids = renderer.prompt_ids(messages, TOOLS, previous)
        assert renderer.tokenizer.decode(ids) == renderer.render(messages, TOOLS)


def test_sampled_tokens_are_never_encoded_again(renderer):
    first = acted(renderer, STATE, TOOLS)
    # the same text in other tokens: one byte each, as a model might sample it
    letters = [renderer.tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "ab"]
    completion_ids = [*letters, renderer.tokenizer.eos_token_id]
    odd = replace(first, completion_ids=completion_ids, action="ab")
    messages = [*STATE, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "no"}]
    ids = renderer.prompt_ids(messages, TOOLS, odd)
    assert ids[: len(first.prompt_ids) + 3] == [*first.prompt_ids, *odd.completion_ids]


def test_a_state_that_does_not_extend_the_last_is_rendered_afresh(renderer):
    first = acted(renderer, STATE, TOOLS)
    messages = [STATE[1], {"role": "assistant", "content": ACTION}, REPLY]
    fresh = renderer.prompt_ids(messages, TOOLS, None)
    assert renderer.prompt_ids(messages, TOOLS, first) == fresh


def test_after_a_second_kind_of_end_the_state_is_what_a_server_would_render(renderer):
    """A model may declare several ends of a turn; the template knows one."""
    previous = acted(renderer, STATE, TOOLS)
    other = renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    previous = replace(previous, completion_ids=[*previous.completion_ids[:-1], other])
    state = [*STATE, {"role": "assistant", "content": ACTION}, REPLY]
    ids = renderer.prompt_ids(state, TOOLS, previous)
    assert other not in ids
    assert ids == renderer.prompt_ids(state, TOOLS, None)


def test_a_template_that_ignores_tools_is_refused():
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ConfigurationError, match='tool_format="tags"'):
        ChatRenderer(tokenizer).check_tools(TOOLS)


def test_a_note_stands_at_the_end_of_the_question_and_writes_no_control_tokens(renderer):
    ids = renderer.prompt_ids(STATE, TOOLS, None)
    place = renderer.end_of_state(ids)
    decode = renderer.tokenizer.decode
    assert decode(ids[:place]).endswith("Where is Oslo?")
    note = renderer.note_ids(f" Before: {ACTION}<|im_end|>")
    assert renderer.tokenizer.eos_token_id not in note
    assert renderer.tokenizer.convert_tokens_to_ids("<tool_call>") in note  # the model's own
    whole = decode([*ids[:place], *note, *ids[place:]])
    assert f"Where is Oslo? Before: {ACTION}<|im_end|><|im_end|>\n<|im_start|>assistant" in whole
    assert renderer.end_of_state([0, 1]) is None


def deepseek():
    """DeepSeek's template with the control tokens that it writes."""
    tokenizer = make_tokenizer("deepseek_r1_distill")
    tokenizer.add_special_tokens({"bos_token": "<｜begin▁of▁sentence｜>"})
    tokenizer.add_special_tokens({"eos_token": "<｜end▁of▁sentence｜>"})
    tokenizer.add_tokens(
        ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>"], special_tokens=True
    )
    return tokenizer


def told(renderer, reply, action="{open}Hm, {i}.\n</think>\n\nact {i}", num_turns=3):
    """Play turns by the renderer; yield each state, its tokens, and the transition before it."""
    messages, previous = list(STATE), None
    end = renderer.tokenizer.eos_token
    for i in range(num_turns + 1):
        ids = renderer.prompt_ids(messages, None, previous)
        yield messages, ids, previous
        is_open = renderer.render(messages, None).rstrip().endswith("<think>")
        text = action.format(open="" if is_open else "<think>\n", i=i)
        written = renderer.tokenizer(text + end, add_special_tokens=False)["input_ids"]
        previous = replace(
            acted(renderer, messages, None), prompt_ids=ids, completion_ids=written, action=text
        )
        messages = [*messages, {"role": "assistant", "content": text}, reply]


def squeezed(text):
    return "".join(text.split())


USER = {"role": "user", "content": "Go on."}
THINKING = ["qwen3", "qwen3_5_think", "lfm2_2_5", "nemotron_3_nano", "deepseek"]


@pytest.mark.parametrize("name", THINKING)
def test_a_thinking_model_sees_what_a_server_would_show_it(name):
    renderer = ChatRenderer(deepseek() if name == "deepseek" else make_tokenizer(name))
    for reply in (USER, REPLY):
        for action in ("{open}Hm, {i}.\n</think>\n\nact {i}", "act {i}"):
            for messages, ids, _ in told(renderer, reply, action):
                shown = renderer.tokenizer.decode(ids)
                assert squeezed(shown) == squeezed(renderer.render(messages, None))


@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think"])
def test_thoughts_between_calls_of_tools_stay_and_the_row_goes_on(name):
    renderer = ChatRenderer(make_tokenizer(name))
    for _, ids, previous in told(renderer, REPLY):
        if previous is not None:
            before = [*previous.prompt_ids, *previous.completion_ids]
            assert ids[: len(before)] == before
    assert renderer.tokenizer.decode(ids).count("Hm,") == 3
