"""TRL's vLLM generation on a CPU.

TRL assumes CUDA: it loads weights parameter by parameter, which fails where vLLM packs them for the
CPU, and sends them to a server by NCCL. These subclasses of its classes do the same on a CPU; see
`agent_trainers.policies.cpu_weights`. All else, such as names, adapters and order, stays TRL's.
"""

import functools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.trainer import grpo_trainer
from vllm import LLM
from vllm.utils.network_utils import get_ip

from agent_trainers.policies.cpu_weights import open_group, pack_heads
from agent_trainers.policies.engines import CPU_OPTIONS


def use_cpu_engine() -> None:
    """Make the trainers of this process use the classes below instead of TRL's."""
    grpo_trainer.VLLMGeneration = CpuGeneration


class CpuClient(VLLMClient):  # type: ignore[misc] # TRL is untyped
    """Sends weights to a server by gloo."""

    def init_communicator(self, device: Any = "cpu") -> None:
        """Connect to the workers of the server."""
        size = self.get_world_size() + 1
        info = {"master_address": get_ip(), "master_port": self.group_port}
        self._concurrently(
            "init_weight_transfer_engine",
            {"init_info": {**info, "rank_offset": 1, "world_size": size}},
            lambda: setattr(self, "_group", open_group(*info.values(), rank=0, size=size)),
        )

    def update_named_params(
        self,
        metadata: list[tuple[str, str, list[int]]],
        named_params: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        """Send all weights, in the order of `metadata`: name, type and shape of each."""
        names, dtypes, shapes = (list(field) for field in zip(*metadata, strict=True))
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes}

        def send() -> None:
            for _, weight in named_params:
                self._group.broadcast(weight.detach().contiguous(), 0).wait()

        self._start_weight_update()
        self._concurrently("update_weights", {"update_info": info}, send)
        self._finish_weight_update()

    def _concurrently(self, route: str, body: dict[str, Any], function: Any) -> None:
        """Call `function` while the server handles a request: both wait for each other."""
        with ThreadPoolExecutor(1) as executor:
            reply = executor.submit(self._post, f"{self.base_url}/{route}", json=body)
            function()
            reply.result()


class CpuGeneration(vllm_generation.VLLMGeneration):  # type: ignore[misc] # TRL is untyped
    """Colocated engine or server on a CPU, in the type of the trained weights."""

    def _init_vllm(self) -> None:
        dtype = str(self.model.dtype).removeprefix("torch.")
        vllm_generation.LLM = functools.partial(LLM, dtype=dtype, **CPU_OPTIONS)
        vllm_generation.VLLMClient = CpuClient
        super()._init_vllm()

    def sync_weights(self) -> None:
        """Send the trained weights to the engine."""
        if self.mode == "server":
            super().sync_weights()
            return
        runner = self.llm.llm_engine.model_executor.driver_worker.model_runner
        runner.reload_weights(weights_iterator=self._iter_named_params())
        pack_heads(runner.get_model())
        self.llm.reset_prefix_cache()
