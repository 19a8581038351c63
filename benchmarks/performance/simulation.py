"""Simulate asynchronous training at scale: ``python -m benchmarks.performance.simulation``.

The project's own scheduling code (`AsyncRollouts`, `Rollout`, `SlotStream`) runs in virtual time.
Forward passes, optimiser steps and tools are events that take times recorded in real runs.
``--record`` records such runs of the embedded policy, predicts cases that were not recorded for
the simulation, and measures those, too. Without it the published recordings are used.

Tool calls take one latency, in 5 % of the calls twenty times as long. A worker is a process with
its own copy of the policy and eight episodes; all workers take each optimiser step together.
"""

import argparse
import bisect
import contextlib
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import simpy
import torch
from openai._constants import INITIAL_RETRY_DELAY, MAX_RETRY_DELAY
from tqdm.auto import tqdm

from agent_envs.core.command_line import CommandLineParser, positive_int
from agent_envs.data.files import write_json
from agent_trainers import TINY_POLICY
from agent_trainers.cli.launch import leave_process_group
from agent_trainers.policies.engines import VLLMServerPolicy
from agent_trainers.policies.policy import Generation, GenerationRequest, Policy, VersionedPolicy
from agent_trainers.policies.sampling import Completion, SamplingSettings
from agent_trainers.policies.slots import SlotStream
from agent_trainers.rollout.collector import Rollout, _EpisodeLoop
from agent_trainers.rollout.evaluation import plan_samples
from agent_trainers.trainers.async_rollouts import AsyncRollouts
from agent_trainers.trainers.config import StepGRPOConfig
from agent_trainers.trainers.grpo import StepGRPOTrainer
from agent_trainers.trainers.rollouts import TrainerRollouts
from agent_trainers.trajectory import Trajectory
from benchmarks.performance import faulty_engine
from benchmarks.performance.async_rollouts import SLOW_FACTOR, SLOW_SHARE, make_slow_env
from benchmarks.performance.faulty_engine import FAULTS, FaultyEngine
from benchmarks.performance.models import make_config, quieten
from benchmarks.performance.steps import Waits
from benchmarks.performance.virtual_time import VirtualTime, virtual_time

RESULTS: Final = Path(__file__).parents[1] / "results" / "simulation.json"
WARM_UP: Final = 4
"""Optimiser steps at the start that do not count."""
TIMEOUT: Final = 5.0
"""Seconds until a session repeats a request."""
EPISODES: Final = 8
"""Episodes of a worker."""
FAULTY: Final = "engine with faults"
MOST: Final = 1500
"""Values of a kind that are published."""
_END: Final = 1
_SLICE: Final = 0.01
"""Seconds after which a computation lets others have its core."""
_NEAREST: Final = 40
"""Recorded passes of about the same batch size from which the time of a pass is drawn."""
Case = dict[str, Any]
"""Options of a run: rollout, max_staleness, episodes (per process), processes, is_fast."""
SYNC: Final[Case] = {"rollout": "sync"}
ASYNC: Final[Case] = {"rollout": "async", "max_staleness": 1}
FIT: Final[Mapping[str, Case]] = {
    "sync": SYNC | {"is_fast": True},
    "async": ASYNC | {"is_fast": True},
}
"""Runs without slow calls in one process, whose times are recorded."""
LEFT_OUT: Final[Mapping[str, Case]] = {
    "slow tools, synchronous": SYNC,
    "slow tools, at most 1 update ahead": ASYNC,
    "slow tools, at most 4 updates ahead": ASYNC | {"max_staleness": 4},
    "two processes, synchronous": SYNC | {"processes": 2},
    "two processes, at most 4 updates ahead": ASYNC | {"max_staleness": 4, "processes": 2},
}
MODES: Final[Mapping[str, Case]] = {
    "synchronous": SYNC, "one step off": ASYNC, "carried over": ASYNC | {"max_staleness": 4},
}  # fmt: skip
WORKERS: Final = (8, 32, 128, 1024)


class Recording:
    """Times of real runs, from which those of events are drawn."""

    def __init__(self, runs: Mapping[str, Any], seed: int = 0) -> None:
        """Draw from the recorded `runs` of `FIT`."""
        self.rng = np.random.default_rng(seed)
        self.runs = runs
        self._passes = {
            during: sorted(
                (p[1:] for run in runs.values() for p in run.get("passes", ()) if p[0] == during),
                key=lambda sized: sized[0],
            )
            for during in (False, True)
        }
        self._sizes = {during: [p[0] for p in passes] for during, passes in self._passes.items()}

    def pass_seconds(self, size: int, *, during_update: bool) -> float:
        """Draw the time of a forward pass for `size` turns."""
        passes, sizes = self._passes[during_update], self._sizes[during_update]
        first, last = bisect.bisect_left(sizes, size), bisect.bisect_right(sizes, size)
        margin = max(0, _NEAREST - (last - first)) // 2
        first = max(0, min(first - margin, len(sizes) - _NEAREST))
        return float(self._choose(passes[first : max(last + margin, first + _NEAREST)])[1])

    def update_seconds(self, rollout: str) -> float:
        """Draw the time from the last episode of a batch to the start of the next step."""
        return float(self._choose(self.runs[rollout]["updates"]))

    def episode(self) -> list[list[float]]:
        """Draw an episode: tokens, seconds beyond the latency, and calls of each turn."""
        return list(self._choose(self.runs["sync"]["episodes"]))

    def _choose(self, values: Sequence[Any]) -> Any:
        return values[self.rng.integers(len(values))]


def latencies(case: Case, rng: np.random.Generator) -> Iterator[float]:
    """Draw latencies of tool calls; one of each 20 is slow, which varies less than 5 % of all."""
    while True:
        block = np.full(round(1 / SLOW_SHARE), case["latency"])
        block[rng.integers(len(block))] *= 1 if case.get("is_fast") else SLOW_FACTOR
        yield from block.tolist()


# The simulation


class SimulatedEnv(gym.Env[str, str]):
    """An episode of the recording, whose states are the lengths of the turns."""

    def __init__(
        self, clock: VirtualTime, recording: Recording, latencies: Iterator[float]
    ) -> None:
        self._clock, self._recording, self._latencies = clock, recording, latencies

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Draw an episode."""
        self._turns = self._recording.episode()
        return "", self._info()

    def step(self, action: str) -> Any:
        """Take the time of a step."""
        _, seconds, calls = self._turns.pop(0)
        self._clock.sleep(seconds + (next(self._latencies) if calls else 0.0))
        return "", 0.0, not self._turns, False, self._info() if self._turns else {}

    def _info(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": str(self._turns[0][0])}]}


class SimulatedPolicy(Policy):
    """A policy in slots whose prompts are the lengths of its turns."""

    max_slots = 2**31
    settings = SamplingSettings(max_new_tokens=2**31, eos_token_ids=(_END,), temperature=0.0)

    def __init__(self, take_pass: Callable[[int], None]) -> None:
        self._take_pass = take_pass

    def open_stream(self) -> SlotStream:
        """Schedule turns in slots."""
        return _SimulatedStream(self, self._take_pass)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Refuse: turns come from the stream."""
        raise NotImplementedError

    def encode(self, request: GenerationRequest) -> list[int]:
        """Return the length of the turn."""
        return [int(request.messages[-1]["content"])]

    def start_guide(self, _: object) -> None:
        """Return no guide."""

    def generation(self, prompt: list[int], completion: Completion) -> Generation:
        """Return the turn."""
        return Generation(text="", prompt_ids=prompt, completion_ids=completion.token_ids)


class _SimulatedStream(SlotStream):
    """The scheduling of slots, with time instead of forward passes."""

    def __init__(self, policy: Any, take_pass: Callable[[int], None]) -> None:
        super().__init__(policy, contextlib.nullcontext())
        self._take_pass = take_pass

    def _prefill(self) -> None:
        self._decoding |= self._prefilling
        self._prefilling = {}

    def _decode(self) -> None:
        self._take_pass(len(self._decoding) + len(self._prefilling))
        for turn in self._decoding.values():
            turn.token_ids.append(_END if len(turn.token_ids) + 1 >= turn.prompt[0] else 0)
            turn.logprobs.append(0.0)


class _Meeting:
    """A place where all processes wait for each other."""

    def __init__(self, clock: VirtualTime, size: int) -> None:
        self._clock, self._size, self._events = clock, size, list[simpy.Event]()

    def wait(self) -> None:
        if len(self._events) == self._size - 1:
            for event in self._events:
                event.succeed()
            self._events = []
        else:
            self._events.append(own := self._clock.events.event())
            self._clock.wait_for(own)


class _Cores:
    """The cores of a machine, which computations share."""

    def __init__(self, clock: VirtualTime, number: int) -> None:
        self._clock, self._cores = clock, simpy.Resource(clock.events, number)

    def compute(self, seconds: float) -> None:
        while seconds > 0:
            with self._cores.request() as core:
                self._clock.wait_for(core)
                self._clock.sleep(min(seconds, _SLICE))
            seconds -= _SLICE


class SimulatedTrainer:
    """What `AsyncRollouts` uses of a trainer, and a loop of optimiser steps."""

    def __init__(
        self,
        clock: VirtualTime,
        recording: Recording,
        case: Case,
        index: int,
        meeting: _Meeting,
        compute: Callable[[float], None],
    ) -> None:
        self._recording, self._meeting, self._compute = recording, meeting, compute
        is_ahead = {"max_staleness": case["max_staleness"]} if "max_staleness" in case else {}
        self.args = StepGRPOConfig(
            output_dir="unused", rollout=case["rollout"], **is_ahead, use_cpu=True, bf16=False,
            per_device_train_batch_size=case["episodes"], max_steps=case["steps"], seed=index,
        )  # fmt: skip
        self.processes = SimpleNamespace(
            size=case["processes"], index=index, all_gather=self._all_gather
        )
        self.extensions, self.num_generations, self.num_generations_eval = (), 8, 1
        self.state = SimpleNamespace(global_step=0, max_steps=case["steps"])
        self._step, self._buffered_inputs, self._is_updating = 0, None, False
        policy = SimulatedPolicy(self._take_pass)
        self._ahead = VersionedPolicy(policy)
        self.generator = SimpleNamespace(publish=self._publish)
        make_env = functools.partial(SimulatedEnv, clock, recording, latencies(case, recording.rng))
        kind, acting = (
            (TrainerRollouts, policy) if case["rollout"] == "sync" else (AsyncRollouts, self._ahead)
        )
        self._rollouts = kind(self, {"train": Rollout(make_env, acting)})
        self.log = RunLog(clock)

    def train(self) -> dict[str, Any]:
        """Take all optimiser steps."""
        rollouts = self._rollouts
        rows: Iterator[Any] = itertools.repeat(
            [{"task": 0}] * self.args.per_device_train_batch_size
        )
        for step in range(self.args.max_steps):
            self.state.global_step = self._step = step
            if isinstance(rollouts, AsyncRollouts):
                rows_of_step = rollouts.take(rows, 1)
                rollouts.start({})
            else:
                rows_of_step = itertools.islice(rows, 1)
            batch = rollouts.collect(next(rows_of_step), "train", (step, 0))
            self._meeting.wait()  # the processes exchange rewards
            self._buffered_inputs, self._is_updating = {}, True
            self.log.begin(batch.trajectories, step)
            self._compute(self._recording.update_seconds(self.args.rollout))
            self.log.end()
            self._meeting.wait()  # and gradients
            self._is_updating = False
        rollouts.close()
        return self.log.summary()

    def _publish(self) -> None:
        with self._ahead.update(self.state.global_step):
            pass

    def _take_pass(self, size: int) -> None:
        draw = self._recording.pass_seconds
        self._compute(draw(size, during_update=self._is_updating))

    def _all_gather(self, value: int) -> list[int]:
        self._meeting.wait()
        return [value] * self.processes.size


class RunLog:
    """Times and staleness of the optimiser steps of a real or a simulated run."""

    def __init__(self, clock: Any) -> None:
        self._clock, self._begun = clock, list[float]()
        self._ended, self._ages = [0.0], list[float]()

    def begin(self, trajectories: Sequence[Trajectory], step: int) -> None:
        """Record that a batch is complete."""
        self._begun.append(self._clock.perf_counter())
        turns = [turn for trajectory in trajectories for turn in trajectory.transitions]
        ages = [step - turn.info.get("policy_version", step) for turn in turns]
        self._ages.append(float(np.average(ages, weights=[len(t.completion_ids) for t in turns])))

    def end(self) -> None:
        """Record that the step is done."""
        self._ended.append(self._clock.perf_counter())

    @property
    def updates(self) -> list[float]:
        """Seconds of each update."""
        return [end - begin for begin, end in zip(self._begun, self._ended[1:], strict=True)]

    def summary(self) -> dict[str, float]:
        """Return seconds per step, the share of updates in them, and mean staleness."""
        seconds = self._ended[-1] - self._ended[WARM_UP]
        return {
            "seconds_per_step": seconds / (len(self._ended) - 1 - WARM_UP),
            "utilisation": sum(self.updates[WARM_UP:]) / seconds,
            "staleness": statistics.mean(self._ages[WARM_UP:]),
        }


def simulate(runs: Mapping[str, Any], case: Case, seed: int = 0) -> dict[str, float]:
    """Return the summary of a simulated run."""
    recording, case = Recording(runs, seed), {"processes": 1} | case
    with virtual_time() as clock:
        meeting = _Meeting(clock, case["processes"])
        cores = case.get("cores")  # else each thread of each worker has one
        compute = _Cores(clock, cores).compute if cores else clock.sleep
        trainers = [
            SimulatedTrainer(clock, recording, case, index, meeting, compute)
            for index in range(case["processes"])
        ]
        summaries = clock.run(*(trainer.train for trainer in trainers))
    return {name: statistics.mean(s[name] for s in summaries) for name in summaries[0]}


class SimulatedServer(Policy):
    """A policy whose server fails as `FaultyEngine` does, behind the retries of openai's client."""

    def __init__(
        self, clock: VirtualTime, recording: Mapping[str, Any], sessions: int, seed: int
    ) -> None:
        self.max_concurrency = sessions
        self._clock, self._recording, self._rng = clock, recording, np.random.default_rng(seed)

    def generate(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Take the time of a turn, failed requests included."""
        kinds, shares = [*FAULTS], [*FAULTS.values()]
        for number in itertools.count():
            fault = self._rng.choice(["", *kinds], p=[1 - sum(shares), *shares])
            hangs = fault == "hang"
            self._clock.sleep(TIMEOUT if hangs else self._rng.choice(self._recording["requests"]))
            if not fault:
                break
            delay = min(INITIAL_RETRY_DELAY * 2.0**number, MAX_RETRY_DELAY)
            self._clock.sleep(delay * (1 - 0.25 * self._rng.random()))
        return [Generation(text="") for _ in requests]


class SimulatedSession(gym.Env[str, str]):
    """An episode of as many turns as a recorded one."""

    def __init__(self, recording: Mapping[str, Any]) -> None:
        self._turns = recording["turns"]

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        """Draw the number of turns."""
        self._left = int(np.random.default_rng(seed).choice(self._turns))
        return "", {"messages": [{"role": "user", "content": ""}]}

    def step(self, action: str) -> Any:
        """Count a turn."""
        self._left -= 1
        return "", 0.0, self._left == 0, False, {"messages": [{"role": "user", "content": ""}]}


def simulate_sessions(recording: Mapping[str, Any], sessions: int, rounds: int) -> dict[str, float]:
    """Return the mean seconds of a session with the faulty engine."""
    ends: list[float] = []
    for number in range(rounds):
        with virtual_time() as clock:
            server = SimulatedServer(clock, recording, sessions, number)
            rollout = Rollout(lambda: SimulatedSession(recording), server)
            specs = plan_samples(range(sessions), 1, number)
            clock.run(lambda: rollout.collect(specs, lambda _: ends.append(clock.monotonic())))  # noqa: B023
    return {"seconds_per_session": statistics.mean(ends)}


# Real runs


def run_training(case: Case) -> dict[str, Any]:
    """Train in this process by one thread, and return the summary and the times of events."""
    torch.set_num_threads(1)  # as in several processes
    waits = Waits(latencies(case, np.random.default_rng(0)))
    passes = list[tuple[bool, int, float]]()
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "rollout": case["rollout"], "max_steps": case["steps"],
            "per_device_train_batch_size": case["episodes"], "steps_per_generation": 1,
            "learning_rate": 1e-7, "num_eval_tasks": 0, "save_strategy": "no",
            "report_to": "none", "disable_tqdm": True, "use_cpu": True,
            **({"max_staleness": case["max_staleness"]} if "max_staleness" in case else {}),
        }  # fmt: skip
        trainer = StepGRPOTrainer(
            str(TINY_POLICY), lambda: make_slow_env(waits), make_config(options)
        )
        log, collect, advance = RunLog(time), trainer.rollouts.collect, _EpisodeLoop.advance
        state, episodes = SimpleNamespace(is_updating=False), list[list[tuple[int, float, bool]]]()

        def timed_collect(inputs: Any, mode: str, step: Any, factors: Any = None) -> Any:
            if state.is_updating:
                log.end()
            state.is_updating = False
            batch = collect(inputs, mode, step, factors)
            log.begin(batch.trajectories, step[0])
            state.is_updating = True
            episodes.extend(map(turns_of, batch.trajectories))
            return batch

        def timed_advance(loop: _EpisodeLoop) -> None:
            size, started, during = len(loop._generating), time.perf_counter(), state.is_updating
            advance(loop)
            if size:
                passes.append((during, size, round(time.perf_counter() - started, 5)))

        def turns_of(trajectory: Trajectory) -> list[tuple[int, float, bool]]:
            turns = zip(trajectory.transitions, trajectory.step_seconds, strict=True)
            return [
                (
                    len(turn.completion_ids),
                    round(seconds % case["latency"], 5),
                    seconds > case["latency"],
                )
                for turn, seconds in turns
            ]

        trainer.rollouts.collect = timed_collect  # type: ignore[method-assign]
        with patch.object(_EpisodeLoop, "advance", timed_advance):
            trainer.train()
        log.end()
    return {
        "summary": log.summary(), "passes": passes[-MOST:], "updates": log.updates[WARM_UP:],
        "episodes": episodes[-MOST:],
    }  # fmt: skip


def run_sessions(sessions: int, rounds: int, faults: Mapping[str, float]) -> dict[str, Any]:
    """Run sessions on the faulty engine, and return their mean seconds and the times of turns."""
    engine, ends, requests, turns = FaultyEngine(faults, seconds=1.0), [], [], []
    complete = VLLMServerPolicy.generate

    def timed(policy: Any, batch: Any) -> Any:
        started = time.perf_counter()
        generations = complete(policy, batch)
        requests.append(round(time.perf_counter() - started, 4))
        return generations

    with engine.serving() as url, patch.object(VLLMServerPolicy, "generate", timed):
        for _ in range(rounds):
            started = time.perf_counter()
            found = faulty_engine.run_sessions(
                url, sessions, timeout_seconds=TIMEOUT,
                on_end=lambda _: ends.append(time.perf_counter() - started),  # noqa: B023
            )  # fmt: skip
            turns += [len(trajectory.transitions) for trajectory in found]
    seconds = {"seconds_per_session": statistics.mean(ends)}
    return {"summary": seconds, "requests": requests[-MOST:], "turns": turns}


# The command


def measure(case: Case) -> dict[str, Any]:
    """Run a case in this process, or in several others."""
    if (num_processes := case.get("processes", 1)) == 1:
        return run_training(case)
    launcher = ("torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}", "-m")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "case.json")
        command = ["--case", json.dumps(case), "--output", str(output)]
        subprocess.run(  # noqa: S603 - this command
            [sys.executable, "-m", *launcher, "benchmarks.performance.simulation", *command],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return dict(json.loads(output.read_text(encoding="utf-8")))


def record(settings: Case) -> dict[str, Any]:
    """Run all cases; return the recordings of those for the fit, and the measured others."""
    sessions = {"sessions": settings.pop("sessions"), "rounds": settings.pop("rounds")}
    runs, measured = dict[str, Any](), dict[str, Any]()
    for name, case in tqdm([*FIT.items(), *LEFT_OUT.items()], desc="cases"):
        found = measure(settings | case)
        measured[name] = found.pop("summary")
        if name in FIT:
            runs[name] = found
    runs["sessions"] = run_sessions(**sessions, faults={})
    measured["engine without faults"] = runs["sessions"].pop("summary")
    measured[FAULTY] = run_sessions(**sessions, faults=FAULTS)["summary"]
    sizes = {"settings": settings, "sessions": sessions, "cores": os.cpu_count()}
    return {**sizes, "runs": runs, "measured": measured}


def validate(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Predict each measured case; the error is that of its seconds."""
    settings, runs, rows = dict(results["settings"]), results["runs"], {}
    for name, case in {**FIT, **LEFT_OUT}.items():
        long = settings | {"steps": 5 * settings["steps"]}
        if case.get("processes"):
            long["cores"] = results["cores"]
        rows[name] = simulate(runs, long | case)
    rows[FAULTY] = simulate_sessions(runs["sessions"], results["sessions"]["sessions"], 10)
    return {
        name: {
            "measured": (measured := results["measured"][name]),
            "predicted": predicted,
            "error": next(iter(predicted.values())) / next(iter(measured.values())) - 1,
        }
        for name, predicted in rows.items()
    }


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw utilisation and staleness by the number of workers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axis, key in zip(axes := figure.subplots(1, 2), ("utilisation", "staleness"), strict=True):
        for mode in MODES:
            own = [row for row in rows if row["mode"] == mode]
            axis.plot([r["workers"] for r in own], [r[key] for r in own], marker="o", label=mode)
        axis.set(xscale="log", xlabel="workers", ylabel=key, ylim=(0, None))
        numbers = sorted({row["workers"] for row in rows})
        axis.set_xticks(numbers, [str(number) for number in numbers])
        axis.minorticks_off()
    axes[0].legend()
    figure.savefig(path, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = CommandLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--record", action="store_true", help="measure real runs first")
    parser.add_argument("--output", type=Path, default=RESULTS, help="JSON file of the results")
    parser.add_argument("--latency", type=float, default=0.5, help="seconds of most tool calls")
    parser.add_argument("--steps", type=positive_int, default=20, help="optimiser steps of a run")
    parser.add_argument("--workers", type=positive_int, nargs="*", default=WORKERS)
    parser.add_argument("--case", type=json.loads, help=argparse.SUPPRESS)  # of `measure`
    options = parser.parse_args(arguments)
    quieten()
    if options.case is not None:
        found = run_training(options.case)
        if int(os.environ.get("RANK", "0")) == 0:
            write_json(options.output, found)
        leave_process_group()
        return
    if options.record:
        settings = {"latency": options.latency, "steps": options.steps, "episodes": EPISODES}
        results = record(settings | {"sessions": 16, "rounds": 6})
        write_json(options.output, results)
    results = json.loads(options.output.read_text(encoding="utf-8"))
    results["validation"] = validate(results)
    for name, row in results["validation"].items():
        seconds = [next(iter(row[side].values())) for side in ("measured", "predicted")]
        sys.stdout.write(f"{name:40} {seconds[0]:7.2f} {seconds[1]:7.2f} s {row['error']:+.1%}\n")
    rows = results["scale"] = []
    for workers, (mode, case) in itertools.product(options.workers, MODES.items()):
        steps = WARM_UP + max(6, 320 // workers)
        sizes = {"processes": workers, "episodes": EPISODES, "steps": steps}
        row = simulate(results["runs"], results["settings"] | case | sizes)
        rows.append({"workers": workers, "mode": mode, **row})
        sys.stdout.write(
            f"{workers:5} {mode:12} {row['seconds_per_step']:6.2f} s per step, "
            f"utilisation {row['utilisation']:.1%}, staleness {row['staleness']:.2f}\n"
        )
        sys.stdout.flush()
    write_json(options.output, results)
    plot(rows, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
