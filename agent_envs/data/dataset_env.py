"""`DatasetEnv`: an environment whose tasks are the rows of a data set."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from agent_envs.core.tasks import Task
from agent_envs.core.tool_env import ToolEnv
from agent_envs.data.sources import DatasetSpec, Source

if TYPE_CHECKING:
    import datasets


class DatasetEnv(ToolEnv):
    """Base class of environments whose tasks are rows; a subclass declares its `dataset`."""

    dataset: DatasetSpec[Any]
    not_in_snapshots: ClassVar[frozenset[str]] = frozenset({"_tasks"})

    def __init__(
        self,
        *,
        data: "str | datasets.Dataset | None" = None,
        split: str | None = None,
        **shared: Any,
    ) -> None:
        """Load the tasks, which environments of one process and source share.

        Args:
            data: A JSONL, JSON (also ``.gz``) or Parquet file of rows, or a ``datasets.Dataset``;
                the public data set on the hub if not given.
            split: The split of the hub's data set, instead of the usual one.
            shared: Arguments of `ToolEnv`.
        """
        self._tasks = self.load_tasks(self.dataset.find(data, split))
        super().__init__(**shared)

    def load_tasks(self, source: Source) -> Sequence[Task]:
        """Return the tasks of a source, by default one per row."""
        return _load_tasks(self.dataset, source)

    @property
    def num_tasks(self) -> int:
        return len(self._tasks)

    def get_task(self, index: int) -> Task:
        return self._tasks[index]


@lru_cache(maxsize=8)
def _load_tasks(dataset: DatasetSpec[Task], source: Source) -> tuple[Task, ...]:
    return tuple(dataset.read_all(source))
