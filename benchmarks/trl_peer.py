"""The outside reference: TRL's own GRPO with ``environment_factory``, in the same environments."""

import os
from collections.abc import Callable
from typing import Any, Final

from trl import GRPOConfig, GRPOTrainer

from agent_envs.core.tool_formats import TOOL_FORMATS
from agent_trainers.cli.train import TINY_POLICY
from agent_trainers.grpo import all_tasks
from agent_trainers.grpo_config import StepGRPOConfig
from agent_trainers.rollout import TextEnv

_FORMAT: Final = TOOL_FORMATS["hermes"]
_SHARED: Final = (
    "output_dir", "max_steps", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "num_generations", "per_device_train_batch_size", "max_grad_norm", "use_cpu", "bf16",
    "gradient_checkpointing", "disable_dropout", "dataloader_pin_memory", "logging_steps",
    "save_strategy", "report_to", "disable_tqdm",
)  # fmt: skip
"""Settings that mean the same here and there."""
MAX_COMPLETION_TOKENS: Final = 250
"""TRL's limit is one of the whole episode, results of tools included."""
# TRL renders a call only to see that the template can, and parses calls by a template of its own.
_CONTENT: Final = "{{ message.content }}"
_CALLS: Final = (
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
)
_RESPONSE_TEMPLATE: Final = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>\s*assistant\s*",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}


class SearchEnvironment:
    """An environment of ours, as TRL wants it: public methods are tools."""

    def __init__(self, env: TextEnv) -> None:
        """Wrap `env`."""
        self._env = env

    def reset(self, task: int, **_: Any) -> str:
        """Begin the episode of a dataset row; return the question."""
        observation, _info = self._env.reset(options={"task": task})
        self._return, self._num_steps, self._is_over, self._success = 0.0, 0, False, 0.0
        return observation

    def search(self, query: str) -> str:
        """Search the facts.

        Args:
            query: What to look for.
        """
        return self._step(_FORMAT.write_call("search", {"query": query}))

    def _step(self, action: str) -> str:
        if self._is_over:
            return ""
        observation, reward, terminated, truncated, info = self._env.step(action)
        self._return += float(reward)
        self._num_steps += 1
        self._is_over = terminated or truncated
        self._success = info["metrics"]["success"]
        return observation


def make_trl_trainer(
    make_env: Callable[[], TextEnv], config: StepGRPOConfig, tokenizer: Any
) -> tuple[GRPOTrainer, Callable[[], tuple[int, float]]]:
    """Make TRL's trainer.

    Args:
        make_env: Makes one environment with one tool, ``search``, and one question.
        config: Settings of ours; those that mean the same are taken over.
        tokenizer: The embedded policy's.

    Returns:
        The trainer, and a function that says of its last batch how many environment steps it had
        and what share of its episodes succeeded.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    tokenizer.chat_template = tokenizer.chat_template.replace(_CONTENT, _CONTENT + _CALLS)
    tokenizer.response_template = _RESPONSE_TEMPLATE
    last: list[SearchEnvironment] = []

    def environment_return(
        completions: list[Any], environments: list[SearchEnvironment], **_: Any
    ) -> list[float]:
        for messages, environment in zip(completions, environments, strict=True):
            environment._step(str(messages[-1].get("content") or ""))  # the answer, TRL keeps it
        last[:] = environments
        return [environment._return for environment in environments]

    def played() -> tuple[int, float]:
        num_steps = sum(environment._num_steps for environment in last)
        return num_steps, sum(environment._success for environment in last) / len(last)

    probe = make_env()
    tasks = all_tasks(probe, config)
    trainer = GRPOTrainer(
        model=str(TINY_POLICY),
        reward_funcs=environment_return,
        args=GRPOConfig(
            max_completion_length=MAX_COMPLETION_TOKENS,
            max_tool_calling_iterations=probe.unwrapped.max_turns - 1,  # type: ignore[attr-defined]
            beta=config.beta,
            **{name: getattr(config, name) for name in _SHARED},
        ),
        train_dataset=tasks.map(lambda _: {"prompt": [{"role": "user", "content": ""}]}),
        processing_class=tokenizer,
        environment_factory=lambda: SearchEnvironment(make_env()),
    )
    return trainer, played
