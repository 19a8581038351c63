"""The model card of a run: what was trained, where, and what came of it."""

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from huggingface_hub import ModelCardData

EMBEDDED: Final = "embedded policy"
"""What the model is called where none was given."""


def model_card(results: Mapping[str, Any], output_dir: str, hub_model_id: str | None) -> str:
    """Return the text of ``README.md`` beside a trained model.

    `results` is what ``results.json`` holds; what is not known yet is None there.
    """
    model = results["model"]
    is_on_hub = model != EMBEDDED and not Path(model).exists()
    metadata = ModelCardData(
        base_model=model if is_on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["agent-r1", "reinforcement-learning", "trl", results["algorithm"]],
    )
    eval_kwargs = results["env_kwargs"] | results["eval_env_kwargs"]
    name = hub_model_id or output_dir
    command = ["agent-r1-eval", "--model", name, "--env", results["env"]]
    if eval_kwargs:
        command += ["--env_kwargs", json.dumps(eval_kwargs)]
    facts = {
        "base model": model,
        "environment": results["env"],
        "its arguments in training": json.dumps(results["env_kwargs"]),
        "its arguments in evaluation": json.dumps(eval_kwargs),
        "algorithm": results["algorithm"],
        "optimiser steps": results["steps"] or "training goes on",
        "success before training": _percent(results["success_before"]),
        "success after training": _percent(results["success_after"]),
        "evaluation episodes": results["num_eval_episodes"],
        **results["versions"],
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""---
{metadata.to_yaml()}
---
# {Path(name).name}

A language model trained by step-level reinforcement learning with Agent-R1 Gym.

| | |
|---|---|
{table}

Trained with:

```
{results["command"]}
```

Evaluate it with:

```
{shlex.join(command)}
```
"""


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{share:.1%}"
