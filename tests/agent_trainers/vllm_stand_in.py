"""Stand-ins for vLLM with a small model: its engine, and its server as TRL's clients know it.

Real are TRL's client, the HTTP between both and what is done to the weights; samples come from
transformers. The weights themselves go through a queue instead of NCCL, so the server runs in the
process that sends them.
"""

import contextlib
import json
import queue
import sys
import threading
import time
import zlib
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agent_trainers.policies.sampling import SamplingSettings, sample
from tests.agent_trainers.chat_server import Reply, json_server, refuses

SERVER_INFO = {
    "weight_transfer_config": {"backend": "nccl"},
    "model_config": {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"},
}


class EngineStandIn:
    """An ``LLMEngine`` that samples a turn at once and returns it token by token."""

    def __init__(self, model, eos_token_ids, drift=0.0):
        self.model, self.eos_token_ids, self.drift = model, tuple(eos_token_ids), drift
        self.running = {}
        self.parameters = []

    def add_request(self, request_id, prompt, parameters):
        if getattr(parameters.structured_outputs, "structural_tag", None) == '"wrong"':
            raise ValueError("wrong tag")
        self.parameters.append(parameters)
        settings = SamplingSettings(
            max_new_tokens=parameters.max_tokens, eos_token_ids=self.eos_token_ids, pad_token_id=0
        )
        rngs = [np.random.default_rng(parameters.seed)]
        (completion,) = sample(self.model, [prompt["prompt_token_ids"]], rngs, settings)
        self.running[request_id] = [0, completion]

    def step(self):
        assert self.running
        outputs = []
        for request_id, turn in list(self.running.items()):
            turn[0] += 1
            if is_over := turn[0] >= len(turn[1].token_ids):
                del self.running[request_id]
            outputs.append(SimpleNamespace(
                request_id=request_id, finished=is_over, outputs=[self._output(turn[1])]
            ))  # fmt: skip
        return [output for output in outputs if output.finished]

    def abort_request(self, request_ids):
        for request_id in request_ids:
            del self.running[request_id]

    def _output(self, completion):
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        values = [{t: SimpleNamespace(logprob=float(p) - self.drift)} for t, p in pairs]
        return SimpleNamespace(token_ids=completion.token_ids, logprobs=values)


def vllm_modules():
    """The names of vLLM that an engine in this process needs, by module."""
    kinds = SimpleNamespace(FINAL_ONLY=2)
    parameters = SimpleNamespace(RequestOutputKind=kinds, StructuredOutputsParams=SimpleNamespace)
    return {
        "vllm": SimpleNamespace(SamplingParams=SimpleNamespace),
        "vllm.sampling_params": parameters,
    }


class VLLMStandIn:
    """Serves a model; notes what it was asked for."""

    def __init__(self, model, eos_token_ids):
        self.model = AutoModelForCausalLM.from_pretrained(model)
        self.name, self.eos_token_ids = str(model), tuple(eos_token_ids)
        self.sent = queue.Queue()
        self.calls = []
        self.prompts = []
        self.versions = []
        self.bodies = []
        self.faults = []
        """For the next completions: a status to refuse with, or seconds to let them wait."""
        self._lock = threading.Lock()

    def get(self, path):
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": self.name, "max_model_len": 512}]},
            "/server_info": {"vllm_config": SERVER_INFO},
            "/get_world_size": {"world_size": 1},
        }[path]

    def post(self, path, body):
        self.calls.append(path)
        if path == "/v1/completions":
            with self._lock:
                return self._complete(body)
        if path == "/update_weights":
            with self._lock:
                self._receive(body["update_info"])
        assert path in (
            "/init_weight_transfer_engine", "/start_weight_update", "/update_weights",
            "/finish_weight_update", "/reset_prefix_cache", "/pause", "/resume",
        ), path  # fmt: skip
        return {"success": True}

    def _receive(self, info):
        parameters = dict(self.model.named_parameters())
        for name, dtype, shape in zip(
            info["names"], info["dtype_names"], info["shapes"], strict=True
        ):
            sent_name, tensor = self.sent.get(timeout=60)
            assert (sent_name, list(tensor.shape)) == (name, shape)
            assert str(tensor.dtype) == f"torch.{dtype}"
            with torch.no_grad():
                parameters[name].copy_(tensor)
        assert set(info["names"]) == set(parameters)

    def _complete(self, body):
        assert body["n"] == 1
        self.bodies.append(body)
        prompts = body["prompt"]
        prompts = [prompts] if isinstance(prompts[0], int) else prompts
        self.prompts.append(prompts)
        settings = SamplingSettings(
            max_new_tokens=body["max_tokens"], eos_token_ids=self.eos_token_ids, pad_token_id=0,
            temperature=body["temperature"],
        )  # fmt: skip
        seed = body.get("seed", len(self.prompts))
        rngs = [np.random.default_rng([seed % 2**32, *place(p, i)]) for i, p in enumerate(prompts)]
        completions = sample(self.model, prompts, rngs, settings)
        return {"choices": [choice(p, c) for p, c in zip(prompts, completions, strict=True)]}


def place(prompt, number):
    return zlib.crc32(json.dumps(prompt).encode()), number


def choice(prompt, completion):
    logprobs = [float(value) for value in completion.logprobs]
    return {
        "prompt_token_ids": prompt,
        "token_ids": completion.token_ids,
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in completion.token_ids],
            "token_logprobs": logprobs,
            "top_logprobs": [{} for _ in logprobs],
        },
    }


@contextlib.contextmanager
def serving(stand_in):
    """Serve on a free port of this machine; yields the address."""

    def answer(path, body, _):
        if body is None:
            return Reply(stand_in.get(path))
        if path == "/v1/completions" and stand_in.faults:
            fault = stand_in.faults.pop(0)
            if isinstance(fault, int):
                return refuses(fault, "not now")
            time.sleep(fault)
        return Reply(stand_in.post(path, body))

    with json_server(answer) as url:
        yield url


@contextlib.contextmanager
def vllm_at_hand(stand_in):
    """Let TRL believe that vLLM is installed; its tensors go to `stand_in` instead of NCCL."""

    def init_communicator(client, device=0):
        assert client.get_server_info()["weight_transfer_config"] is not None
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": {}})

    def send(iterator, group, src, post_iter_func):
        for name, tensor in iterator:
            stand_in.sent.put((name, tensor.detach().clone()))

    def is_available(*arguments, **options):
        return True

    client = "trl.generation.vllm_client"
    cpu_engine = SimpleNamespace(use_cpu_engine=lambda: None)  # TRL's own way, as with CUDA
    with (
        mock.patch("agent_trainers.trainers.grpo.require_extra"),
        mock.patch.dict(sys.modules, {"agent_trainers.trainers.cpu_engine": cpu_engine}),
        mock.patch(f"{client}.is_vllm_available", is_available),
        mock.patch("trl.generation.vllm_generation.is_vllm_available", is_available),
        mock.patch(f"{client}._HAS_STATEFUL_TRAINER_ENGINE", True),
        mock.patch(f"{client}._HAS_RESET_PREFIX_CACHE_SUCCESS", True),
        mock.patch(f"{client}.packed_nccl_broadcast_producer", send, create=True),
        mock.patch(f"{client}.VLLMClient.init_communicator", init_communicator),
    ):
        yield
