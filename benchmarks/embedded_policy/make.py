"""Tokenizer, model, demonstrations and training of the embedded policy.

A word-level tokenizer and a Qwen3-type model of about 0.2 million parameters, initialised with
induction heads. Three rounds of supervised training on demonstrations in synthetic languages: two
of correct ones, which teach to read questions and facts, to search and to copy names, then one with
deliberate errors: early answers, and answers that repeat the query. The result solves few tasks,
which leaves room for reinforcement learning.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import yaml
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.messages import Message
from agent_envs.data.files import write_text
from agent_envs.envs.synthetic.world import Question, Relation, World, make_question, vocabulary
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.retrieval import Corpus, Retriever, build_retriever
from agent_envs.tools.search import format_hits
from agent_trainers.policies.local import transformers_policy
from agent_trainers.recipes import RECIPES
from agent_trainers.rollout.environments import TextEnv
from agent_trainers.rollout.evaluation import evaluate_policy
from agent_trainers.tiny_policy.make import END, PAD, START, fast_tokenizer, make_model
from benchmarks.embedded_policy.induction import initialise_induction_heads
from benchmarks.embedded_policy.languages import NOUNS, VERBS, draw_world

UNKNOWN: Final = "<unk>"
_MARKUP: Final = (
    *("<tool_call>", "</tool_call>", "<answer>", "</answer>"),
    *('{"name":', '"search",', '"arguments":', '{"query":', '"', '"}}'),
    *("user", "assistant", "tool", "tools", "search"),
    *(f"[{rank}]" for rank in range(1, 21)),
)
CALL_OPENS: Final = '<tool_call>{"name": "search", "arguments": {"query": "'
CALL_ENDS: Final = '"}}</tool_call>'
"""Two tokens around the query of a search: sampling dominates the time of a step."""
_SEARCH: Final = (
    (r'<tool_call>\s*\{"name":\s*"search",\s*"arguments":\s*\{"query":\s*"', CALL_OPENS),
    (r'"\s*\}\s*\}\s*</tool_call>', CALL_ENDS),
)
_WORD: Final = "|".join(re.escape(text) for _, text in _SEARCH) + (
    r"""|</?\w+>|\{"name":|"search",|"arguments":|\{"query":|"\}\}|\[\d+\]|'s\b|\w+|[^\w\s]"""
)
FORMAT: Final = TOOL_FORMATS["hermes"]


class Round(NamedTuple):
    """One round of supervised training."""

    num_steps: int
    learning_rate: float
    hops: tuple[int, ...]
    """Lengths of questions to draw from."""
    top_k: tuple[int, ...]
    """Numbers of search results to draw from, per demonstration."""
    p_correct_query: float = 1.0
    """Probability of each query to be correct."""
    p_early_answer: float = 0.0
    """Probability after each search to answer at once."""
    p_copy_query: float = 0.0
    """Probability of an answer to repeat the subject of the last query."""


_LISTS: Final = (1, 1, 2, 2, 3, 4, 6, 9, 12)
ROUNDS: Final = (
    Round(1000, 3e-3, (1, 2, 2, 3), (1, 2, 3, 4)),
    Round(1500, 3e-3, (1, 2, 3, 4), _LISTS),
    Round(
        150, 1e-3, (1, 2, 3, 4), _LISTS, p_correct_query=0.97, p_early_answer=0.5, p_copy_query=0.9
    ),
)  # fmt: skip
"""In the last round errors are frequent, so that the policy fails by habit."""
ROPE_THETA: Final = 1e5
"""Two thirds of a head's dimensions rotate slowly enough to compare words at any distance here."""
TOKENS_PER_STEP: Final = 2000
NUM_SORTED: Final = 256
"""Demonstrations sorted by length at a time, to make batches of similar length."""
QUESTIONS_PER_WORLD: Final = 8


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return the word-level tokenizer with its chat template."""
    words = dict.fromkeys(
        [PAD, UNKNOWN, START, END, CALL_OPENS, CALL_ENDS, *_MARKUP, *vocabulary()]
    )
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Lowercase(), *(normalizers.Replace(Regex(p), t) for p, t in _SEARCH)]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(_WORD), behavior="removed", invert=True)
    return fast_tokenizer(tokenizer, model_max_length=1024, unk_token=UNKNOWN)


def make_copying_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, **changes: Any
) -> Qwen3ForCausalLM:
    """Return the model before training, with heads that compare and copy words."""
    rotary = {"rope_type": "default", "rope_theta": ROPE_THETA}
    model = make_model(tokenizer, head_dim=32, rope_parameters=rotary, **changes)
    initialise_induction_heads(model, torch.Generator().manual_seed(seed))
    return model


def queries(world: World, question: Question) -> list[str]:
    """Return the query of each hop: the last result and the words of the remaining relations.

    The words, one per hop, are in the order of the question.
    """
    path = [world.facts[number] for number in question.gold]
    words = [word_of(world.relations[fact.relation]) for fact in path]
    asked = question.text.split()
    # after an auxiliary, "works" is "work"
    place = {word: asked.index(word if word in asked else word[:-1]) for word in words}
    return [
        " ".join([fact.subject, *sorted(words[done:], key=place.__getitem__)])
        for done, fact in enumerate(path)
    ]


def word_of(relation: Relation) -> str:
    """Return the word that expresses the relation."""
    (word,) = {*NOUNS, *VERBS}.intersection(relation.fact.split())
    return word


def demonstrate(
    world: World, question: Question, retriever: Retriever, errors: Round, rng: np.random.Generator
) -> list[Message]:
    """Return the conversation of a question, with the errors of a round."""
    top_k = int(rng.choice(errors.top_k))
    messages: list[Message] = [{"role": "user", "content": question.text}]
    for number, query in zip(question.gold, queries(world, question), strict=True):
        fact = world.facts[number]
        if rng.random() >= errors.p_correct_query:
            relation = world.relations[str(rng.choice(list(world.relations)))]
            query = f"{fact.subject} {word_of(relation)}"
        found = format_hits(retriever.search(query, top_k))
        call = FORMAT.write_call("search", {"query": query})
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "tool", "name": "search", "content": found})
        if rng.random() < errors.p_early_answer:
            break
    answer = fact.subject if rng.random() < errors.p_copy_query else fact.object
    messages.append({"role": "assistant", "content": FORMAT.write_answer(answer)})
    return messages


def demonstrations(errors: Round, rng: np.random.Generator) -> Iterator[list[Message]]:
    """Yield demonstrations in synthetic languages, infinitely."""
    while True:
        world = draw_world(rng, outdated=bool(rng.random() < 0.5))
        retriever = build_retriever(Corpus(world.passages))
        for _ in range(QUESTIONS_PER_WORLD):
            question = make_question(world, rng, hops=int(rng.choice(errors.hops)))
            yield demonstrate(world, question, retriever, errors, rng)


def encode(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them are the policy's."""
    ids: list[int] = tokenizer(f"{START}tools search{END}", add_special_tokens=False)["input_ids"]
    is_sampled = [False] * len(ids)
    for message in messages:
        header = tokenizer(f"{START}{message['role']}", add_special_tokens=False)["input_ids"]
        body = tokenizer(f"{message['content']}{END}", add_special_tokens=False)["input_ids"]
        ids += header + body
        is_sampled += [False] * len(header) + [message["role"] == "assistant"] * len(body)
    return ids, is_sampled


def batches(
    errors: Round, tokenizer: Any, rng: np.random.Generator
) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Yield batches of demonstrations of similar length, infinitely."""
    stream = demonstrations(errors, rng)
    while True:
        drawn = [encode(tokenizer, next(stream)) for _ in range(NUM_SORTED)]
        drawn.sort(key=lambda row: len(row[0]))
        cut: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in drawn:
            if (len(cut[-1]) + 1) * len(row[0]) > TOKENS_PER_STEP:
                cut.append([])
            cut[-1].append(row)
        for number in rng.permutation(len(cut)).tolist():
            yield cut[number]


def train(model: Qwen3ForCausalLM, tokenizer: Any, seed: int) -> None:
    """Train `model` on all rounds."""
    for number, errors in enumerate(ROUNDS, start=1):
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=errors.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, errors.learning_rate, total_steps=errors.num_steps, pct_start=0.1
        )
        stream = batches(errors, tokenizer, np.random.default_rng([seed, number]))
        label = f"round {number} of {len(ROUNDS)}"
        progress = tqdm(range(errors.num_steps), desc=label, unit="step")
        for _ in progress:
            loss = _loss(model, next(stream), tokenizer.pad_token_id)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            progress.set_postfix(loss=f"{loss.item():.3f}")


def _loss(
    model: Qwen3ForCausalLM, batch: list[tuple[list[int], list[bool]]], pad_token_id: int
) -> torch.Tensor:
    rows = [(torch.tensor(tokens), torch.tensor(is_sampled)) for tokens, is_sampled in batch]
    ids = pad_sequence([tokens for tokens, _ in rows], True, pad_token_id)
    labels = pad_sequence(
        [tokens.where(is_sampled, -100) for tokens, is_sampled in rows], True, -100
    )
    loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def mixture(**changes: Any) -> functools.partial[TextEnv]:
    """Return a factory of the default recipe's environment in held-out worlds, with `changes`."""
    recipe = yaml.safe_load(RECIPES["default"].read_text(encoding="utf-8"))
    kwargs = recipe["env_kwargs"] | recipe["eval_env_kwargs"] | changes
    return functools.partial(gym.make, recipe["env"], **kwargs)


def measure(model: Any, tokenizer: Any, *, temperature: float, num_tasks: int = 500) -> float:
    """Return the success of a policy in the mixture."""
    policy = transformers_policy(model, tokenizer, max_new_tokens=24, temperature=temperature)
    return evaluate_policy(mixture(), policy, range(num_tasks), seed=1).metrics["success"]


def write_card(output: Path, model: Any, sampled: float, greedy: float) -> None:
    """Write the model card."""
    write_text(
        output / "README.md",
        f"""---
license: apache-2.0
---
# The embedded policy of Agent-R1 Gym

A Qwen3-type model of {model.num_parameters():,} parameters with a word-level vocabulary, made by
`python -m benchmarks.embedded_policy`: supervised training on correct, then on careless
demonstrations in synthetic languages of the words of `AgentR1/SyntheticMultiHop-v0`. By chance one
language in 16 expresses a fact like the variant `paraphrase`, and one in 8 like `relations`. Its
vocabulary is limited to these worlds.

Success in 500 held-out worlds of the mixture that the default recipe trains on, before any
reinforcement learning: {sampled:.1%} sampled at temperature 1, {greedy:.1%} greedy.
""",
    )


def make(output: Path, seed: int) -> None:
    """Make the policy, evaluate it, and save it."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    model = make_copying_model(tokenizer, seed)
    train(model, tokenizer, seed)
    model.eval()
    sampled = measure(model, tokenizer, temperature=1.0)
    greedy = measure(model, tokenizer, temperature=0.0)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    write_card(output, model, sampled, greedy)
    tqdm.write(
        f"{output}: {model.num_parameters():,} parameters, success {sampled:.1%} sampled, "
        f"{greedy:.1%} greedy"
    )
