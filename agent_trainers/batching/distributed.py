"""Communication between the processes of a run."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from accelerate.utils import gather_object

T = TypeVar("T")


class ProcessGroup:
    """The processes of a run. Every method is collective: all processes must call it."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.device: torch.device = accelerator.device
        self.size: int = accelerator.num_processes
        self.index: int = accelerator.process_index

    def all_gather(self, value: int) -> list[int]:
        """Return the value of each process, shape (P,)."""
        tensor = torch.tensor([value], device=self._accelerator.device)
        values: list[int] = self._accelerator.gather(tensor).tolist()
        return values

    def all_gather_objects(self, items: Sequence[T]) -> list[T]:
        """Return the items of all processes, those of the first process first."""
        gathered: list[T] = gather_object(list(items))
        return gathered

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all processes, same shape."""
        total: torch.Tensor = self._accelerator.reduce(tensor, reduction="sum")
        return total

    def any(self, value: bool) -> bool:
        """Return whether the value of any process is true."""
        return any(self.all_gather(int(value)))

    def num_before(self, count: int) -> int:
        """Return the sum of `count` over the processes before this one."""
        return sum(self.all_gather(count)[: self.index])

    def normalise(self, weights: torch.Tensor) -> torch.Tensor:
        """Return weights that sum to 1 over all processes, same shape; all 0 if all are."""
        return weights / self.all_reduce(weights.sum()).clamp(min=1.0)


@contextmanager
def without_sync(accelerator: Any, model: Any, others: Sequence[Any] = ()) -> Iterator[None]:
    """Accumulate gradients without synchronisation, because another micro-batch follows.

    Within a window the `Trainer` itself does not synchronise `model`, but the `others`.
    """
    state = accelerator.gradient_state
    is_last = state.sync_gradients
    with ExitStack() as stack:
        state._set_sync_gradients(False)  # DeepSpeed steps where this is True
        stack.callback(state._set_sync_gradients, is_last)
        for trained in (model, *others) if is_last else others:
            stack.enter_context(accelerator.no_sync(trained))
        yield
