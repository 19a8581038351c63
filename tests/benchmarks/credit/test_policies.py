"""The policies of the stages: kept when enough is solved, and never the same one twice."""

from types import SimpleNamespace

import pytest

from agent_trainers.recipes import find_turn_length
from benchmarks.credit.policies import _KeepStages
from benchmarks.learning_run import EnvironmentStepBudget


class Written:
    """A model of which only is seen when it was written."""

    version = 0

    def save_pretrained(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "version").write_text(str(self.version))


@pytest.mark.parametrize(
    ("solved", "expected"),
    [
        pytest.param([0.1, 0.5, 0.6, 0.8, 0.9], {"middle": 2, "late": 4}, id="reached"),
        pytest.param([0.1, 0.1, 0.2, 0.3, 0.3], {"middle": 3, "late": 5}, id="not reached"),
        pytest.param([0.1, 0.2, 0.3, 0.8, 0.9], {"middle": 3, "late": 4}, id="late"),
    ],
)
def test_stages_are_kept_when_enough_is_solved_or_else_half_way_and_at_the_end(
    tmp_path, solved, expected
):
    start, folder, model = tmp_path / "start", tmp_path / "run", Written()
    start.mkdir()
    (start / "recipe.yaml").write_text("max_completion_length: 48\n")
    batches = iter(solved)
    steps = EnvironmentStepBudget(100, lambda: (20, next(batches)))
    trainer = SimpleNamespace(model=model, processing_class=model)
    stages = _KeepStages(trainer, start, folder, steps)
    for model.version in range(1, 1 + len(solved)):
        steps.on_step_end(None, None, SimpleNamespace())
        stages.on_step_end()
    stages.keep_missing()
    kept = {stage: int((folder / stage / "version").read_text()) for stage in ("middle", "late")}
    assert kept == expected
    assert stages.kept == {stage: solved[number - 1] for stage, number in expected.items()}
    assert find_turn_length(str(folder / "late")).tokens == 48
