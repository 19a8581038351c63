"""Each library's own loop over an environment of ours, with scripted actions."""

import asyncio
import json
from dataclasses import dataclass, field

import gymnasium as gym
import numpy as np

from agent_envs.adapters.own_episode import OwnEpisode, draw_tasks
from agent_envs.wrappers import ConversationObservation, MenuActions, TokenObservation
from tests.agent_envs.remote.conftest import Served
from tests.agent_trainers.chat_server import json_server, says

LENGTH = 8192


@dataclass
class Played:
    """An episode as a library's loop shows it; None for parts that it does not show."""

    observations: list[str] | None = None
    """The question, then the observation of each turn."""
    states: list[list[dict]] | None = None
    """The messages of each state in which a model was called."""
    texts: list[str] | None = None
    """Each state as one text."""
    rewards: list[float] = field(default_factory=list)
    terms: list[dict] = field(default_factory=list)
    episode_return: float = 0.0
    end: tuple[bool, bool] | None = None
    """Terminated, truncated."""
    tools: list[dict] | None = None
    """The schemas that reached the model besides the messages."""
    precision: float = 0.0
    """Absolute error of the library's rewards: some are float32."""
    notes: dict = field(default_factory=dict)

    def add(self, reward, terms, end, observation=None):
        """Record a turn."""
        self.rewards.append(reward)
        self.terms.append(terms)
        self.end = end
        self.episode_return += reward
        if observation is not None:
            self.observations.append(observation)


class Driver:
    """The loop of a library."""

    library = ""
    module = ""

    @staticmethod
    def reset_of(env_id, kwargs, seed):
        """Return the arguments with which ``reset`` begins the same episode."""
        return {"seed": seed}


def drawn_task(env_id, kwargs, seed):
    env = gym.make(env_id, **kwargs)
    task, seed_of_task = next(draw_tasks(env_id, env, 1, seed))
    return {"seed": seed_of_task, "options": {"task": task}}


class GEM(Driver):
    library, module = "GEM", "gem"

    def make(self, env_id, kwargs):
        import gem

        from agent_envs.adapters.gem import register

        register(env_id)
        return gem.make(env_id, **kwargs)

    def play(self, env_id, kwargs, seed, actions):
        env = self.make(env_id, kwargs)
        first, info = env.reset(seed=seed)
        played = Played(observations=[first])
        for action in actions:
            observation, reward, terminated, truncated, info = env.step(action)
            played.add(reward, info["reward_terms"], (terminated, truncated), observation)
        return played


class SkyRL(Driver):
    library, module = "skyrl-gym", "skyrl_gym"
    reset_of = staticmethod(drawn_task)

    def play(self, env_id, kwargs, seed, actions):
        import skyrl_gym

        from agent_envs.adapters.skyrl_gym import register, task_rows

        register(env_id)
        (row,) = task_rows(env_id, num_tasks=1, seed=seed, **kwargs)
        # As SkyRL's generator does it.
        env = skyrl_gym.make(row.pop("env_class"), env_config=kwargs, extras=row)
        chat, _ = env.init(row["prompt"])
        assert chat == row["prompt"]
        played = Played(states=[list(chat)], notes={"appended": True})
        for action in actions:
            step = env.step(action)
            chat = [*chat, {"role": "assistant", "content": action}, *step["observations"]]
            played.states.append(chat)
            info = step["metadata"]
            end = info["terminated"], info["truncated"]
            played.add(step["reward"], info["reward_terms"], end)
        assert step["done"] == any(played.end)
        env.close()
        return played


class TextArena(Driver):
    library, module = "TextArena", "textarena"

    def make(self, env_id, kwargs, seed):
        import textarena as ta

        from agent_envs.adapters.textarena import register

        register(env_id)
        env = ta.make(env_id, **kwargs)
        env.reset(num_players=1, seed=seed)
        return env

    def play(self, env_id, kwargs, seed, actions):
        env = self.make(env_id, kwargs, seed)
        played = Played(observations=[])
        for action in [*actions, None]:
            player, messages = env.get_observation()
            assert player == 0
            game = [message for sender, message, _ in messages if sender == -1]
            played.observations.append("".join(game))
            if action is not None:
                done, info = env.step(action)
                end = info["terminated"], info["truncated"]
                played.add(info["reward"], info["reward_terms"], end)
                assert done == any(end)
        rewards, game_info = env.close()
        played.episode_return = rewards[0]
        assert sum(game_info[0]["reward_terms"].values()) == rewards[0]
        return played


class OpenEnv(Driver):
    """Its client, on a server of ours."""

    library, module = "OpenEnv", "openenv"

    def play(self, env_id, kwargs, seed, actions):
        from openenv.core.generic_client import GenericEnvClient

        served = Served(lambda: gym.make(env_id, **kwargs))
        with GenericEnvClient(base_url=served.url).sync() as client:
            first = client.reset(seed=seed, episode_id="one")
            results = [client.step({"text": action}) for action in actions]
            assert client.state()["step_count"] == len(actions)
        served.stop()
        observed = [result.observation for result in (first, *results)]
        end = observed[-1]["terminated"], observed[-1]["truncated"]
        assert results[-1].done == any(end)
        return Played(
            observations=[each["text"] for each in observed],
            states=[each["info"]["messages"] for each in observed],
            rewards=[result.reward for result in results],
            terms=[each["info"]["reward_terms"] for each in observed[1:]],
            episode_return=sum(result.reward for result in results),
            end=end,
            tools=observed[0]["info"]["tools"],
            notes={"raw": True},
        )


class Verifiers(Driver):
    library, module = "verifiers", "verifiers"
    reset_of = staticmethod(drawn_task)

    def play(self, env_id, kwargs, seed, actions):
        with ChatServer(lambda place, body: actions[place]) as server:
            (episode,) = self.run(env_id, kwargs, seed, server, 1)
        (trace,) = episode.traces
        assert episode.ok
        assert not trace.errors
        turns = trace.info["turns"]
        return Played(
            observations=[trace.task.data.prompt, *(turn["observation"] for turn in turns)],
            states=[body["messages"] for body in server.requests],
            rewards=[turn["reward"] for turn in turns],
            terms=[turn["reward_terms"] for turn in turns],
            episode_return=trace.reward,
            end=(not trace.is_truncated, trace.is_truncated),
            tools=server.requests[0].get("tools"),
        )

    def run(self, env_id, kwargs, seed, server, num_tasks, **limits):
        import verifiers.v1 as vf

        taskset = {"id": "agent_r1", "environment": env_id, "arguments": kwargs}
        taskset |= {"num_tasks": num_tasks, "seed": seed}
        agent = {"runtime": {"type": "subprocess"}, **limits}
        config = vf.resolve_env_config({"taskset": taskset, "agent": agent})
        url = f"http://127.0.0.1:{server.port}/v1"
        client = vf.EvalClientConfig(base_url=url, api_key_var="NO_KEY")

        async def play():
            env = vf.load_environment(config)
            context = vf.ModelContext(model="scripted", client=client)
            async with env.serving():
                return await asyncio.gather(*(env.run_episode(t, context) for t in env.taskset))

        return asyncio.run(play())


class InspectAI(Driver):
    library, module = "inspect_ai", "inspect_ai"
    reset_of = staticmethod(drawn_task)

    def __init__(self):
        from inspect_ai.log import read_eval_log  # noqa: F401 - says early what is missing

    def play(self, env_id, kwargs, seed, actions):
        states, tools = [], []

        def reply(messages, offered):
            states.append([as_openai(message) for message in messages])
            tools[:] = offered
            return actions[len(states) - 1]

        (sample,) = self.run(env_id, kwargs, seed, reply, 1).samples
        turns = sample.metadata["turns"]
        earned = sample.scores["earned"].value
        return Played(
            observations=[sample.input, *(turn["observation"] for turn in turns)],
            states=states,
            rewards=[turn["reward"] for turn in turns],
            terms=[turn["reward_terms"] for turn in turns],
            episode_return=earned["return"],
            end=(turns[-1]["terminated"], turns[-1]["truncated"]),
            tools=[{"type": "function", "function": plain_schema(tool)} for tool in tools],
        )

    def run(self, env_id, kwargs, seed, reply, num_tasks, **limits):
        from inspect_ai import eval as evaluate
        from inspect_ai.model import ModelOutput, ModelUsage, get_model

        from agent_envs.adapters.inspect_ai import agent_r1

        def generate(messages, tools, choice, config):
            output = ModelOutput.from_content("scripted", reply(messages, tools))
            calls = output.message.text
            if calls.startswith('{"tool_calls"'):
                output = self.with_calls(json.loads(calls)["tool_calls"], tools)
            output.usage = ModelUsage()  # else it would download a tokenizer
            return output

        model = get_model("mockllm/model", custom_outputs=generate, memoize=False)
        task = agent_r1(env_id, num_tasks, seed, **kwargs)
        (log,) = evaluate(task, model=model, display="none", log_dir=self.logs, **limits)
        assert log.status == "success", log.error
        return log

    def with_calls(self, calls, tools):
        from inspect_ai.model import ModelOutput
        from inspect_ai.model._call_tools import parse_tool_call

        output = ModelOutput.from_content("scripted", "")
        functions = [call["function"] for call in calls]
        output.message.tool_calls = [
            parse_tool_call(str(i), f["name"], f["arguments"], tools)
            for i, f in enumerate(functions)
        ]
        return output


class TorchRL(Driver):
    library, module = "TorchRL", "torchrl"

    def play(self, env_id, kwargs, seed, actions):
        from torchrl.envs import GymWrapper

        from agent_envs.adapters.torchrl import InfoReader

        inner = gym.make(env_id, **kwargs)
        env = GymWrapper(inner)
        names = list(inner.unwrapped.reward_weights)
        env.set_info_dict_reader(InfoReader(names))
        td = env.reset(seed=seed)
        played = Played(observations=[td["observation"]], precision=1e-6)
        for action in actions:
            td["action"] = action
            td = env.step(td)["next"]
            terms = {name: td["reward_terms", name].item() for name in names}
            end = td["terminated"].item(), td["truncated"].item()
            played.add(td["reward"].item(), terms, end, td["observation"])
        assert td["done"].item() == any(played.end)
        return played


def encode(text):
    return [byte + 1 for byte in text.encode()]  # 0 fills up


def decode(ids):
    return bytes(token - 1 for token in ids).decode("utf-8", "replace")


def as_numbers(env_id, kwargs, actions):
    """Make an environment whose observations and actions are numbers; return it, and actions."""
    env = ConversationObservation(gym.make(env_id, **kwargs))
    env = TokenObservation(env, encode, max_length=LENGTH, num_tokens=257)
    texts = sorted(set(actions))
    return MenuActions(env, texts, size=len(texts) + 1), [texts.index(a) for a in actions]


def read(tokens):
    return decode([int(token) for token in tokens if token])


class StableBaselines3(Driver):
    library, module = "Stable-Baselines3", "stable_baselines3"

    def play(self, env_id, kwargs, seed, actions):
        from stable_baselines3.common.vec_env import DummyVecEnv

        env, numbers = as_numbers(env_id, kwargs, actions)
        envs = DummyVecEnv([lambda: env])
        envs.seed(seed)
        observation = envs.reset()
        played = Played(texts=[read(observation[0])], precision=1e-6)
        for number in numbers:
            observation, rewards, dones, infos = envs.step(np.array([number]))
            (info,) = infos
            last = info["terminal_observation"] if dones[0] else observation[0]
            played.texts.append(read(last))
            truncated = info["TimeLimit.truncated"]
            end = bool(dones[0]) and not truncated, truncated
            played.add(float(rewards[0]), info["reward_terms"], end)
        return played


class CleanRL(Driver):
    """Its scripts are single files around Gymnasium's synchronous vector environment."""

    library, module = "CleanRL", "gymnasium"

    def play(self, env_id, kwargs, seed, actions):
        env, numbers = as_numbers(env_id, kwargs, actions)
        env = gym.wrappers.RecordEpisodeStatistics(env)
        envs = gym.vector.SyncVectorEnv([lambda: env])
        observation, _ = envs.reset(seed=seed)
        played = Played(texts=[read(observation[0])])
        for number in numbers:
            observation, rewards, terminated, truncated, infos = envs.step(np.array([number]))
            played.texts.append(read(observation[0]))
            named = infos["reward_terms"]
            terms = {name: named[name][0] for name in named if not name.startswith("_")}
            played.add(float(rewards[0]), terms, (bool(terminated[0]), bool(truncated[0])))
        played.episode_return = float(infos["episode"]["r"][0])
        return played


DRIVERS = [
    *(Verifiers, OpenEnv, SkyRL, GEM, TextArena, InspectAI, TorchRL, StableBaselines3, CleanRL)
]


def as_openai(message):
    shown = {"role": message.role, "content": message.text}
    if message.role == "assistant" and message.tool_calls:
        calls = [{"name": c.function, "arguments": c.arguments} for c in message.tool_calls]
        shown["tool_calls"] = calls
    return shown


def plain_schema(tool):
    """Return a tool of inspect_ai as the schema it was made of."""
    schema = tool.model_dump(exclude_none=True)
    schema["parameters"].pop("additionalProperties")
    return schema


class ChatServer:
    """A model on loopback: OpenAI's chat completions, answered by a function."""

    def __init__(self, reply):
        self.requests, self.keys = [], set()
        self._reply, self._serving = reply, json_server(self._answer)

    def _answer(self, path, body, headers):
        self.requests.append(body)
        self.keys.add(headers["authorization"])
        text = self._reply(len(self.requests) - 1, body)
        if not text.startswith('{"tool_calls"'):
            return says(text)
        functions = [call["function"] for call in json.loads(text)["tool_calls"]]
        return says(None, [(each["name"], each["arguments"]) for each in functions])

    def __enter__(self):
        self.port = int(self._serving.__enter__().rpartition(":")[2])
        return self

    def __exit__(self, *error):
        self._serving.__exit__(*error)


def reference(env_id, kwargs, reset, actions):
    """Return the episode of ``gym.make``, and its states as they are sent to models."""
    env, episode = gym.make(env_id, **kwargs), OwnEpisode(env_id, kwargs)
    episode.reset(seed=reset["seed"], task=(reset.get("options") or {}).get("task"))
    observation, info = env.reset(**reset)
    played = Played(observations=[observation], states=[info["messages"]])
    sent = [episode.messages]
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(action)
        episode.step(action)
        played.states.append(info["messages"])
        sent.append(episode.messages)
        played.add(reward, info["reward_terms"], (terminated, truncated), observation)
    played.tools = info["tools"]
    played.notes = {"sent": sent, "opening": "\n\n".join(m["content"] for m in sent[0])}
    return played
