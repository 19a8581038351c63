import functools
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from agent_envs.envs.synthetic.world import VARIANTS, make_question, make_world
from agent_envs.errors import ConfigurationError
from agent_envs.retrieval import Corpus, build_retriever
from agent_trainers.batching.rows import Row
from agent_trainers.cli import train
from agent_trainers.make_tiny_policy import own
from agent_trainers.make_tiny_policy.embedded import (
    ROUNDS,
    demonstrations,
    encode,
    make_copying_model,
    make_model,
    make_tokenizer,
    mixture,
    queries,
    word_of,
)
from agent_trainers.make_tiny_policy.languages import invent_relations
from agent_trainers.make_tiny_policy.lessons import EnvironmentLessons, ProgramLessons
from agent_trainers.policies.local import transformers_policy
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.programs import ProgramTasks
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.trajectory import Transition
from examples import workflows

ID = "AgentR1/SyntheticMultiHop-v0"


def test_the_shipped_policy_is_under_two_megabytes(tiny_policy):
    assert sum(file.stat().st_size for file in Path(tiny_policy).iterdir()) < 2_000_000


def test_the_shipped_tokenizer_is_the_one_that_the_script_makes(tokenizer):
    made = make_tokenizer()
    assert tokenizer.get_vocab() == made.get_vocab()
    assert tokenizer.chat_template == made.chat_template


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("hops", [1, 2, 3, 4])
def test_every_word_of_every_variant_is_known_and_an_action_survives_its_tokens(
    tokenizer, variant, hops
):
    env = gym.make(ID, variant=variant, hops=hops, max_episode_steps=9)
    observation, _ = env.reset(seed=hops)
    for action in env.unwrapped.reference_actions():
        # planted text is of any words
        for text in (observation, action) if variant != "injected" else (action,):
            assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]
        decoded = tokenizer.decode(
            tokenizer(action + "<|im_end|>")["input_ids"], skip_special_tokens=True
        )
        observation, *_, info = env.step(decoded)
    assert info["metrics"]["success"] == 1


def test_demonstrations_are_encoded_as_the_chat_template_renders_them(tokenizer):
    conversation = next(demonstrations(ROUNDS[0], np.random.default_rng(0)))
    tools = [{"type": "function", "function": {"name": "search"}}]
    rendered = tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False)
    ids, written = encode(tokenizer, conversation)
    assert tokenizer(rendered)["input_ids"] == ids
    spoken = [m["content"] for m in conversation if m["role"] == "assistant"]
    sampled = [token for token, is_written in zip(ids, written, strict=True) if is_written]
    assert sampled == tokenizer("<|im_end|>".join([*spoken, ""]))["input_ids"]


def test_states_extend_each_other_token_by_token(tokenizer):
    renderer = ChatRenderer(tokenizer)
    env = gym.make(ID)
    _, info = env.reset(seed=0)
    previous = None
    for action in env.unwrapped.reference_actions()[:2]:
        prompt_ids = renderer.prompt_ids(info["messages"], info["tools"], previous)
        assert prompt_ids == renderer.prompt_ids(info["messages"], info["tools"], None)
        completion_ids = tokenizer(action + "<|im_end|>")["input_ids"]
        previous = Transition(
            messages=info["messages"], prompt_ids=prompt_ids, completion_ids=completion_ids,
            logprobs=np.zeros(len(completion_ids), np.float32), action=action, reward=0.0,
            reward_terms={}, terminated=False, truncated=False, info={},
        )  # fmt: skip
        info = env.step(action)[4]


def test_success_before_training_is_low_but_not_nothing(model, tokenizer):
    policy = transformers_policy(model, tokenizer, max_new_tokens=24)
    two_hops = functools.partial(gym.make, ID, split="test")
    for make_env in (two_hops, mixture()):
        evaluation = evaluate_policy(make_env, policy, range(300))
        assert 0.02 <= evaluation.metrics["success"] <= 0.15
    greedy = transformers_policy(model, tokenizer, max_new_tokens=24, temperature=0.0)
    assert evaluate_policy(two_hops, greedy, range(100)).metrics["success"] <= 0.15


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_searches_of_a_demonstration_find_each_fact_first(variant):
    rng = np.random.default_rng(0)
    world = make_world(rng, variant=variant, outdated=True)
    retriever = build_retriever(Corpus(world.passages))
    for hops in (1, 2, 3, 4):
        question = make_question(world, rng, hops=hops)
        found = [retriever.search(query, 1)[0].passage for query in queries(world, question)]
        assert found == [world.passages[number] for number in question.gold]


def test_made_up_languages_differ_and_know_each_relation_by_one_word():
    rng = np.random.default_rng(0)
    said = [r for _ in range(100) for r in invent_relations(rng).values()]
    assert len({relation.fact for relation in said}) > 300
    assert all(word_of(relation) == relation.query for relation in said)


def test_the_first_weights_copy_what_came_after_the_same_words_before(tokenizer):
    generator = torch.Generator().manual_seed(0)
    words = torch.stack([torch.randperm(100, generator=generator)[:8] + 60 for _ in range(32)])

    def copied(model):
        with torch.no_grad():
            said = model(input_ids=torch.cat([words, words], 1)).logits.argmax(-1)
        return (said[:, 8:-1] == words[:, 1:]).float().mean().item()

    torch.manual_seed(0)
    assert copied(make_model(tokenizer)) < 0.1
    assert copied(make_copying_model(tokenizer, seed=0)) > 0.25


def test_a_policy_for_an_own_environment_knows_its_words_and_brings_its_recipe(tmp_path):
    make_env = functools.partial(gym.make, "AgentR1/SyntheticArithmetic-v0")
    lessons = EnvironmentLessons("--env AgentR1/SyntheticArithmetic-v0", make_env)
    reached = own.make(lessons, tmp_path / "tiny", seed=0, num_tasks=16, num_steps=2, success=0.4)
    assert 0.0 <= reached <= 1.0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    env = make_env()
    _, info = env.reset(seed=12345)
    for text in (info["messages"][-1]["content"], *env.unwrapped.reference_actions(), "Zürich 漢"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    options, config = train.parse_arguments(["--model", str(tmp_path / "tiny")])
    assert (options.algorithm, config.learning_rate) == ("grpo_step", 7e-4)
    assert config.max_completion_length > 8


def test_a_policy_for_a_program_knows_what_an_oracle_says_to_it(tmp_path):
    tasks = ProgramTasks(
        workflows.plan_and_execute, [{"task": i, "split": "train"} for i in range(10)]
    )
    lessons = ProgramLessons("--program x:run", tasks, workflows.oracle)
    own.make(lessons, tmp_path / "tiny", num_steps=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    said = "plan : what is the award of the director of empty mirror ?"
    assert len(tokenizer(said, add_special_tokens=False)["input_ids"]) < len(said) / 2
    (shown,) = lessons.show(ChatRenderer(tokenizer), [next(iter(lessons._asked))])
    assert [t.role for t in shown.transitions] == ["", "", ""]
    assert "$" in shown.transitions[0].action
    assert "--program x:run" in (tmp_path / "tiny" / "README.md").read_text()


def test_an_oracle_that_solves_nothing_is_named_with_the_first_error():
    tasks = ProgramTasks(workflows.plan_and_execute, [{"task": 0}])  # the row lacks its split
    lessons = ProgramLessons("--program x:run", tasks, workflows.oracle)
    with pytest.raises(ConfigurationError, match=r"(?s)solves none of 1 tasks.*'split'"):
        list(lessons.texts([0]))


def test_a_policy_learns_all_of_its_references_then_forgets_its_care(tmp_path, monkeypatch):
    """Two rounds: until 90 % are solved, then, shown careless turns, until 40 % are."""
    monkeypatch.setattr(own, "TOKENS_PER_STEP", 50)
    looks = iter([0.2, 0.95, 0.7, 0.3, 0.1])

    class Lessons(EnvironmentLessons):
        def measure(self, policy, tasks):
            return next(looks)

    make_env = functools.partial(gym.make, "AgentR1/SyntheticArithmetic-v0")
    lessons = Lessons("--env AgentR1/SyntheticArithmetic-v0", make_env)
    assert own.make(lessons, tmp_path / "tiny", num_tasks=8, num_steps=80) == 0.3
    assert next(looks) == 0.1


def test_careless_turns_are_those_of_other_tasks_at_the_same_place(tokenizer):
    make_env = functools.partial(gym.make, ID)
    renderer = ChatRenderer(tokenizer)
    told = EnvironmentLessons("", make_env).show(renderer, range(30))
    changed = own.careless(told, np.random.default_rng(0))
    for place in range(3):
        said = [t.transitions[place].completion_ids for t in told]
        now = [t.transitions[place].completion_ids for t in changed]
        assert all(turn in said for turn in now)
        num_changed = sum(a != b for a, b in zip(said, now, strict=True))
        assert 5 <= num_changed <= 25  # about half of 30
    for before, after in zip(told, changed, strict=True):
        assert [t.prompt_ids for t in before.transitions] == [
            t.prompt_ids for t in after.transitions
        ]
        assert all(len(t.logprobs) == len(t.completion_ids) for t in after.transitions)


def test_only_what_is_said_is_learned(tokenizer):
    """The loss over the positions that are learned is the model's own over all of them."""
    torch.manual_seed(0)
    model = make_model(tokenizer)
    rows = [
        Row(0, [5, 6], [7, 8, 9], [0] * 3, [True] * 3, [True, False, True], [0.0] * 3),
        Row(1, [5], [8], [0], [True], [True], [0.0]),
    ]
    labels = torch.tensor([[-100, -100, 7, -100, 9], [-100, 8, -100, -100, -100]])
    ids = torch.tensor([[5, 6, 7, 8, 9], [5, 8, 0, 0, 0]])
    expected = model(input_ids=ids, labels=labels).loss
    assert own._loss(model, rows, 0).item() == pytest.approx(expected.item(), rel=1e-5)
