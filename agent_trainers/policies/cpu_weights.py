"""Weights that vLLM receives from a trainer on a CPU.

vLLM packs the weights of linear layers for the CPU after loading, so they cannot be loaded one by
one, and it does not pack a head again that shares its weight with the embeddings. A server takes
weights over gloo instead of NCCL with ``--worker-extension-cls
agent_trainers.policies.cpu_weights.GlooWorker --weight-transfer-config '{"backend": "gloo"}'``.
"""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.utils import stateless_init_torch_distributed_process_group
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

Group = torch.distributed.ProcessGroup


def open_group(address: str, port: int, *, rank: int, size: int) -> Group:
    """Connect trainer (rank 0) and workers by gloo; returns when all have come."""
    group: Group = stateless_init_torch_distributed_process_group(address, port, rank, size, "gloo")
    return group


def pack_heads(model: torch.nn.Module) -> None:
    """Pack the weights of heads as they are now; vLLM only does so when it loads one by itself."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


class GlooTransfer(NCCLWeightTransferEngine):  # type: ignore[misc] # vLLM is untyped
    """Receives weights by gloo, with the messages of vLLM's NCCL engine."""

    _group: Group

    def init_transfer_engine(self, init_info: Any) -> None:
        self._group = open_group(
            init_info.master_address,
            init_info.master_port,
            rank=self.parallel_config.rank + init_info.rank_offset,
            size=init_info.world_size,
        )

    def receive_weights(self, update_info: Any) -> None:
        self.model.load_weights(self._receive(update_info))

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        pack_heads(self.model)

    def _receive(self, info: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
            weight = torch.empty(shape, dtype=getattr(torch, dtype))
            self._group.broadcast(weight, 0).wait()
            yield name, weight


class GlooWorker:
    """Extension of vLLM's workers that only has this module imported."""


if "gloo" not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine("gloo", GlooTransfer)
