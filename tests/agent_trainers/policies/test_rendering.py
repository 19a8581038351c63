# ruff: noqa: RUF001 - DeepSeek writes its control tokens with full-width bars
from dataclasses import replace

import pytest

from agent_envs import ConfigurationError
from agent_trainers.policies.local import TokenPolicy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.policies.sampling import SamplingSettings
from tests.agent_trainers.made import roll_out, transition
from tests.agent_trainers.real_models import make_tokenizer

PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}}
SEARCH = {"name": "search", "description": "Search.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": SEARCH}]
STATE = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "Where is Oslo?"}]
ACTION = '<tool_call>{"name": "search", "arguments": {"query": "Oslo"}}</tool_call>'
REPLY = {"role": "tool", "name": "search", "content": "[1] Oslo\nOslo is in Norway."}


@pytest.fixture(params=["qwen2_5", "qwen3"])
def renderer(request):
    return ChatRenderer(make_tokenizer(request.param))


def acted(renderer, messages, tools, action=ACTION, previous=None, end="<|im_end|>"):
    """The transition of a model that wrote `action` in a state."""
    completion_ids = renderer.tokenizer(action + end, add_special_tokens=False)["input_ids"]
    prompt_ids = renderer.prompt_ids(messages, tools, previous)
    return transition(prompt_ids, completion_ids, messages=messages, action=action)


def test_sampled_tokens_are_never_encoded_again_unless_the_state_is_another(renderer):
    first = acted(renderer, STATE, TOOLS)
    # the same text in other tokens: one byte each, as a model might sample it
    letters = [renderer.tokenizer(c, add_special_tokens=False)["input_ids"][0] for c in "ab"]
    completion_ids = [*letters, renderer.tokenizer.eos_token_id]
    odd = replace(first, completion_ids=completion_ids, action="ab")
    messages = [*STATE, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "no"}]
    ids = renderer.prompt_ids(messages, TOOLS, odd)
    assert ids[: len(first.prompt_ids) + 3] == [*first.prompt_ids, *completion_ids]
    # a model may declare several ends of a turn; the template knows one
    other = renderer.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ended = replace(first, completion_ids=[*first.completion_ids[:-1], other])
    turn = [{"role": "assistant", "content": ACTION}, REPLY]
    for state, previous in (([STATE[1], *turn], first), ([*STATE, *turn], ended)):
        ids = renderer.prompt_ids(state, TOOLS, previous)
        assert other not in ids
        assert ids == renderer.prompt_ids(state, TOOLS, None)


def test_a_template_that_ignores_tools_is_refused():
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    settings = SamplingSettings(max_new_tokens=8, eos_token_ids=(tokenizer.eos_token_id,))
    policy = TokenPolicy(ChatRenderer(tokenizer), lambda *_: [], settings, max_prompt_tokens=512)
    with pytest.raises(ConfigurationError, match='tool_format="tags"'):
        roll_out(policy, [0], tool_format="hermes")


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
    others = ["<｜User｜>", "<｜Assistant｜>", "<｜tool▁outputs▁end｜>"]
    ends = {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"}
    tokenizer.add_special_tokens(ends | {"additional_special_tokens": others})
    return tokenizer


def told(renderer, reply, tools, action):
    """Play turns by the renderer; yield each state, its tokens, and the transition before it."""
    messages, previous = list(STATE), None
    for i in range(4):
        ids = renderer.prompt_ids(messages, tools, previous)
        yield messages, ids, previous
        is_open = renderer.render(messages, tools).rstrip().endswith("<think>")
        text = action.replace("OPEN", "" if is_open else "<think>\n").replace("NUMBER", str(i))
        end = renderer.tokenizer.eos_token
        previous = acted(renderer, messages, tools, text, previous, end)
        messages = [*messages, {"role": "assistant", "content": text}, reply]


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "qwen3_5_think", "lfm2_2_5", "nemotron_3_nano", "deepseek"]
)
def test_what_is_added_is_what_the_template_would_have_written(name):
    renderer = ChatRenderer(deepseek() if name == "deepseek" else make_tokenizer(name))
    thought = "OPENHm, NUMBER.\n</think>\n\nact NUMBER"
    # Qwen2.5's template keeps earlier turns as they are, so both ways agree to the letter
    tools, actions = (TOOLS, [ACTION]) if name == "qwen2_5" else (None, [thought, "act NUMBER"])
    for reply in ({"role": "user", "content": "Go on."}, REPLY):
        for action in actions:
            for messages, ids, previous in told(renderer, reply, tools, action):
                shown, wanted = renderer.tokenizer.decode(ids), renderer.render(messages, tools)
                assert shown.split() == wanted.split()
                assert shown == wanted or name != "qwen2_5"
                # thoughts between calls of tools stay, and the row goes on
                if previous and name.startswith("qwen3") and reply is REPLY and action is thought:
                    before = [*previous.prompt_ids, *previous.completion_ids]
                    assert ids[: len(before)] == before
                    assert shown.count("Hm,") == len(messages) // 2 - 1


def test_texts_of_roles_that_a_template_lacks_go_to_the_user():
    renderer = ChatRenderer(make_tokenizer("gemma"))  # no system role, and turns alternate
    turn = {"role": "assistant", "content": "act"}
    assert renderer.render([*STATE, turn, REPLY, REPLY], None).endswith(
        "<start_of_turn>user\nAnswer.\n\nWhere is Oslo?<end_of_turn>\n"
        "<start_of_turn>model\nact<end_of_turn>\n<start_of_turn>user\n"
        + "\n".join([f"<tool_response>\n{REPLY['content']}\n</tool_response>"] * 2)
        + "<end_of_turn>\n<start_of_turn>model\n"
    )


def test_a_template_that_fails_is_refused_before_the_run():
    tokenizer = make_tokenizer("qwen2_5")
    tokenizer.chat_template = "{{ raise_exception('only images') }}"
    with pytest.raises(ConfigurationError, match="cannot render a user's message: only images"):
        ChatRenderer(tokenizer)
