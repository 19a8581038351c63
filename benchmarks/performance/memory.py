"""Predict the memory of training: ``python -m benchmarks.performance.memory``.

A step of the model runs on fake tensors, which have shapes but no data, while PyTorch's
`MemTracker` adds up what is alive: with the trainer's own head and loss, for models of any size.
The predictions are compared with measured peaks of four small models on this CPU, in float32, and
made for the sizes of Qwen2.5 with bfloat16 autocast. The page "LoRA, multi-GPU and vLLM" reads both
from ``benchmarks/results/memory.json``.
"""

import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, PretrainedConfig
from trl.trainer import add_fused_lm_head

from agent_envs.core.command_line import CommandLineParser
from agent_envs.data.files import write_json
from agent_trainers.cli.results import versions
from benchmarks.agent_leaderboard.report.visible_text import markdown_table
from benchmarks.performance.gradients import peak_in_process
from benchmarks.performance.models import SHAPES, Settings, model_config, quieten

RESULTS: Final = Path("benchmarks/results/memory.json")
GIB: Final = 2**30
CHECKED: Final = ("10M", "20M", "40M", "70M")
CHECKED_TOKENS: Final = 2048
TOKENS: Final = 8192
"""Tokens of a micro-batch of the table (``--max_tokens_per_micro_batch``)."""
NUM_ROWS: Final = 4
QWEN: Final[Mapping[str, tuple[int, ...]]] = {
    "0.5B": SHAPES["0.5B"],
    "1.5B": (1536, 8960, 28, 12, 2, 128, 151_936),
    "3B": (2048, 11_008, 36, 16, 2, 128, 151_936),
    "7B": (3584, 18_944, 28, 28, 4, 128, 152_064),
    "14B": (5120, 13_824, 48, 40, 8, 128, 152_064),
    "32B": (5120, 27_648, 64, 40, 8, 128, 152_064),
}
"""Shapes of Qwen2.5; from 7B on the head has its own weight."""
UNTIED: Final = ("7B", "14B", "32B")
FLOAT_BYTES: Final = 4
KEPT_BYTES: Final = 4 * FLOAT_BYTES
"""Bytes per parameter of weight, gradient and both moments of AdamW."""
GPUS: Final = (24, 48, 80, 141)
"""GiB of a GPU."""
USABLE: Final = 0.9
"""Share of it that training can use, besides fragmentation and CUDA's context."""


class Prediction(NamedTuple):
    """Bytes of an optimiser step."""

    num_parameters: int
    peak: int
    """Largest growth while a step runs, over weights and the state of the optimiser."""
    activations: int
    """Largest growth until the backward pass reaches the layers; FSDP does not divide it."""


def predict(
    config: PretrainedConfig, num_tokens: int, *, bf16: bool, checkpoints: bool
) -> Prediction:
    """Predict a step of one micro-batch of `num_tokens` tokens in four rows.

    Weights are in float32; with `bf16` the forward pass is in autocast. `checkpoints` stands for
    ``--gradient_checkpointing``.
    """
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
        add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        optimizer, tracker = torch.optim.AdamW(model.parameters()), MemTracker()
        tracker.track_external(model, optimizer)
        totals = []  # largest so far, when the gradient of the last layer's output is known

        def record(_: Any, __: Any, output: Any) -> None:
            output.last_hidden_state.register_hook(lambda _: totals.append(_total(tracker, "peak")))

        model.base_model.register_forward_hook(record)
        ids = torch.ones(NUM_ROWS, num_tokens // NUM_ROWS, dtype=torch.long)
        with tracker:
            for _ in range(2):  # the first allocates the state of the optimiser
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    output = model(input_ids=ids, labels=ids, fused_lm_head=True)
                output.log_probs.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                tracker.reset_mod_stats()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Prediction(
        num_parameters,
        _total(tracker, "peak") - _total(tracker, "current"),
        totals[0] - FLOAT_BYTES * num_parameters,
    )


def _total(tracker: MemTracker, kind: str) -> int:
    return int(tracker.get_tracker_snapshot(kind)[torch.device("cpu")]["Total"])


def predict_deep(shape: Sequence[int], *, is_tied: bool, checkpoints: bool) -> tuple[int, int]:
    """Predict parameters and activations with autocast of a model with many layers.

    All layers are equal, so both are linear in their number: 1 and 2 layers are run.
    """
    few = [
        predict(
            model_config((*shape[:2], layers, *shape[3:]), 0, tie_word_embeddings=is_tied),
            TOKENS,
            bf16=True,
            checkpoints=checkpoints,
        )
        for layers in (1, 2)
    ]
    steps = shape[2] - 1
    parameters, activations = (
        a + steps * (b - a)
        for a, b in (
            (getattr(one, name) for one in few) for name in ("num_parameters", "activations")
        )
    )
    return parameters, activations


def num_gpus(num_parameters: int, activations: int, gib: int) -> int | None:
    """Return how many GPUs, a power of 2, hold a model that FSDP2 shards; None if none do."""
    free = USABLE * gib * GIB - activations
    number = 1
    while free > 0 and KEPT_BYTES * num_parameters > number * free:
        number *= 2
    return number if free > 0 else None


def check_sizes() -> dict[str, dict[str, float]]:
    """Predict and measure the growth of a step of small models, in bytes."""
    found = {}
    for name in tqdm(CHECKED, desc="checking", disable=None):
        config = model_config(SHAPES[name], 0)
        predicted = predict(config, CHECKED_TOKENS, bf16=False, checkpoints=False)
        measured = peak_in_process(Settings(gradient_model=name, token_budget=CHECKED_TOKENS), 0)
        found[name] = {"predicted": predicted.peak, "measured": measured}
    return found


def predict_sizes() -> dict[str, dict[str, Any]]:
    """Predict the sizes of Qwen2.5 without and with gradient checkpointing, in bytes."""
    found = {}
    for name, shape in tqdm(QWEN.items(), desc="predicting", disable=None):
        (parameters, plain), (_, less) = (
            predict_deep(shape, is_tied=name not in UNTIED, checkpoints=checkpoints)
            for checkpoints in (False, True)
        )
        found[name] = {
            "num_parameters": parameters,
            "activations": plain,
            "activations_with_checkpointing": less,
        }
    return found


def check_table(checked: Mapping[str, Mapping[str, float]]) -> str:
    """Return predictions and measurements as a Markdown table."""
    rows = [
        [name, *(f"{one[kind] / GIB:.2f}" for kind in ("predicted", "measured")),
         f"{one['predicted'] / one['measured'] - 1:+.1%}"]
        for name, one in checked.items()
    ]  # fmt: skip
    return markdown_table(["model", "predicted GiB", "measured GiB", "error"], rows)


def size_table(sizes: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the memory of each size, and the GPUs that it needs, as a Markdown table."""
    rows = []
    for name, one in sizes.items():
        parameters, less = one["num_parameters"], one["activations_with_checkpointing"]
        needed = [num_gpus(parameters, less, gib) for gib in GPUS]
        rows.append([
            name, f"{KEPT_BYTES * parameters / GIB:.0f}", f"{one['activations'] / GIB:.0f}",
            f"{less / GIB:.0f}", *("none" if n is None else str(n) for n in needed),
        ])  # fmt: skip
    head = [
        "model",
        "weights, gradients, AdamW: GiB",
        "activations: GiB",
        "with checkpointing: GiB",
    ]
    return markdown_table([*head, *(f"GPUs of {gib} GiB" for gib in GPUS)], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the results")
    options = parser.parse_args(arguments)
    quieten()
    results = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "versions": versions(),
        "checked": check_sizes(),
        "sizes": predict_sizes(),
    }
    write_json(options.output, results)
    sys.stdout.write(f"{check_table(results['checked'])}\n\n{size_table(results['sizes'])}\n")


if __name__ == "__main__":
    main()
