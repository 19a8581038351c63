"""The folder of a run."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agent_envs.data.files import write_json, write_text
from agent_envs.errors import DataError
from agent_leaderboard.records.manifest import Manifest, check_version, manifest_text
from agent_leaderboard.records.reading import (
    file_sha256,
    parse_json,
    read_lines,
    read_text,
    validated,
)
from agent_leaderboard.records.results import (
    ResultLine,
    SecondsLine,
    TaskEntry,
    parse_line,
    parse_seconds,
    tasks_text,
)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's folder; what is read from it raises `DataError` that names file, line and field."""

    path: Path

    @property
    def manifest_path(self) -> Path:
        """The manifest."""
        return self.path / "manifest.json"

    @property
    def checksums_path(self) -> Path:
        """The checksums."""
        return self.path / "checksums.json"

    def tasks_path(self, environment: str) -> Path:
        """The list of tasks of an environment."""
        return self.path / "tasks" / f"{environment}.json"

    def results_path(self, environment: str, agent: str) -> Path:
        """The results of an agent in an environment."""
        return self.path / "results" / environment / f"{agent}.jsonl"

    def seconds_path(self, environment: str, agent: str) -> Path:
        """The seconds that each episode of `results_path` took."""
        return self.path / "seconds" / environment / f"{agent}.jsonl"

    def read_manifest(self) -> Manifest:
        """Read the manifest; one of another version is an error, too."""
        path = self.manifest_path
        record = parse_json(read_text(path), path)
        check_version(record, path)
        manifest: Manifest = validated(Manifest, record, path)
        return manifest

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest."""
        write_text(self.manifest_path, manifest_text(manifest))

    def read_tasks(self, environment: str) -> list[TaskEntry]:
        """Read the fixed list of tasks of an environment."""
        path = self.tasks_path(environment)
        entries: list[TaskEntry] = validated(
            list[TaskEntry], parse_json(read_text(path), path), path
        )
        return entries

    def write_tasks(self, environment: str, entries: Sequence[TaskEntry]) -> None:
        """Write the fixed list of tasks of an environment."""
        write_text(self.tasks_path(environment), tasks_text(entries))

    def read_results(self, environment: str, agent: str) -> list[ResultLine]:
        """Read the results of an agent in an environment."""
        path = self.results_path(environment, agent)
        return [parse_line(text, f"{path}, line {number}") for number, text in read_lines(path)]

    def read_seconds(self, environment: str, agent: str) -> list[SecondsLine]:
        """Read how long episodes took, in the order of the results; empty if not at hand."""
        path = self.seconds_path(environment, agent)
        texts = read_lines(path) if path.exists() else ()
        return [parse_seconds(text, f"{path}, line {number}") for number, text in texts]

    def expected_files(self, manifest: Manifest) -> list[str]:
        """Return the paths that `checksums.json` covers, sorted."""
        paths = [self.manifest_path]
        paths += [self.tasks_path(environment.slug) for environment in manifest.environments]
        paths += [self.results_path(e.slug, a.slug) for e, a in manifest.cells]
        return sorted(path.relative_to(self.path).as_posix() for path in paths)

    def write_checksums(self, manifest: Manifest) -> None:
        """Seal a run that is complete."""
        names = self.expected_files(manifest)
        write_json(self.checksums_path, {name: file_sha256(self.path / name) for name in names})

    def read_checksums(self) -> dict[str, str]:
        """Read the checksums; where they are missing, the run is not complete."""
        path = self.checksums_path
        if not path.exists():
            raise DataError(
                f"{path}: is missing: the run is not complete. Give the command that began it once "
                "more; it goes on."
            )
        checksums: dict[str, str] = validated(
            dict[str, str], parse_json(read_text(path), path), path
        )
        return checksums
