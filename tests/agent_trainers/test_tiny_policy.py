import gymnasium as gym
from transformers import AutoTokenizer

from agent_trainers.cli.environments import inspect_environment
from agent_trainers.cli.train import parse_arguments
from agent_trainers.policies.rendering import ChatRenderer
from agent_trainers.programs import ProgramTasks
from agent_trainers.tiny_policy import make
from examples import workflows
from tests.agent_trainers.made import transition

ID = "AgentR1/SyntheticMultiHop-v0"


def test_states_extend_each_other_token_by_token(tokenizer):
    renderer = ChatRenderer(tokenizer)
    env = gym.make(ID)
    _, info = env.reset(seed=0)
    previous = None
    for action in env.unwrapped.reference_actions()[:2]:
        prompt_ids = renderer.prompt_ids(info["messages"], info["tools"], previous)
        assert prompt_ids == renderer.prompt_ids(info["messages"], info["tools"], None)
        completion_ids = tokenizer(action + "<|im_end|>")["input_ids"]
        messages = info["messages"]
        previous = transition(prompt_ids, completion_ids, messages=messages, action=action)
        info = env.step(action)[4]


def test_a_policy_for_an_environment_knows_its_words_and_has_a_recipe(tmp_path, monkeypatch):
    evaluations = iter([0.2, 0.95, 0.7, 0.3, 0.1, 0.4])

    class Source(make.EnvironmentSource):
        def evaluate(self, policy, tasks):
            if (score := next(evaluations)) == 0.2:  # one real evaluation is enough
                super().evaluate(policy, tasks[:2])
            return score

    monkeypatch.setattr(make, "TOKENS_PER_STEP", 50)
    source = Source(inspect_environment("AgentR1/SyntheticArithmetic-v0", {}))
    assert make.make_tiny_policy(source, tmp_path / "tiny", num_tasks=8, num_steps=80) == 0.3
    # stopped at 90 % of correct turns, then at 40 %; and next at 10 % of correct turns
    assert make.make_tiny_policy(source, tmp_path / "tiny", num_tasks=8, learned=0.1) == 0.1
    assert next(evaluations) == 0.4
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    env = gym.make("AgentR1/SyntheticArithmetic-v0")
    _, info = env.reset(seed=12345)
    for text in (info["messages"][-1]["content"], *env.unwrapped.reference_actions(), "Zürich 漢"):
        assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    options, config = parse_arguments(["--model", str(tmp_path / "tiny")])
    assert (options.algorithm, config.learning_rate) == ("grpo_step", 1e-3)
    assert config.max_completion_length > 8


def test_a_policy_for_a_program_knows_the_answers_of_its_oracle(tmp_path):
    tasks = ProgramTasks(
        workflows.plan_and_execute, [{"task": i, "split": "train"} for i in range(10)]
    )
    source = workflows.ProgramSource(tasks, workflows.oracle)
    make.make_tiny_policy(source, tmp_path / "tiny", num_steps=1)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    text = "plan : what is the award of the director of empty mirror ?"
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) < len(text) / 2
    (shown,) = source.demonstrate([0])
    assert [t.role for t in shown.transitions] == ["planner", "executor", "executor"]
    assert "$" in shown.transitions[0].action
