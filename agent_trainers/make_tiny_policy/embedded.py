"""The embedded policy, made from nothing.

A word-level tokenizer, a Qwen3-type model of about 0.2 million parameters whose first weights copy,
and three rounds of supervised training on demonstrations in made-up languages: two of clean ones,
which teach it to read questions and facts, to search and to copy names, then one of bad habits:
answers before the last hop, and answers that only name what was searched for. What is left is a
policy that can do the task but rarely does: for reinforcement learning to mend.
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
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import agent_envs  # noqa: F401 - registers the environments
from agent_envs.core.messages import Message
from agent_envs.data.files import write_text
from agent_envs.envs.synthetic.world import Question, Relation, World, make_question, vocabulary
from agent_envs.formats.tool_formats import TOOL_FORMATS
from agent_envs.retrieval import Corpus, Retriever, build_retriever
from agent_envs.tools.search import format_hits
from agent_trainers.make_tiny_policy.induction import put_in_induction_heads
from agent_trainers.make_tiny_policy.languages import NOUNS, VERBS, invent_world
from agent_trainers.policies.local import transformers_policy
from agent_trainers.recipes import RECIPES
from agent_trainers.rollout.episode import TextEnv
from agent_trainers.rollout.evaluation import evaluate_policy

PAD, UNKNOWN, START, END = "<pad>", "<unk>", "<|im_start|>", "<|im_end|>"
_MARKUP: Final = (
    *("<tool_call>", "</tool_call>", "<answer>", "</answer>"),
    *('{"name":', '"search",', '"arguments":', '{"query":', '"', '"}}'),
    *("user", "assistant", "tool", "tools", "search"),
    *(f"[{rank}]" for rank in range(1, 21)),
)
CALL_OPENS: Final = '<tool_call>{"name": "search", "arguments": {"query": "'
CALL_ENDS: Final = '"}}</tool_call>'
"""A search is written around its query in two tokens: what is sampled costs most of a step."""
_SEARCH: Final = (
    (r'<tool_call>\s*\{"name":\s*"search",\s*"arguments":\s*\{"query":\s*"', CALL_OPENS),
    (r'"\s*\}\s*\}\s*</tool_call>', CALL_ENDS),
)
_WORD: Final = "|".join(re.escape(text) for _, text in _SEARCH) + (
    r"""|</?\w+>|\{"name":|"search",|"arguments":|\{"query":|"\}\}|\[\d+\]|'s\b|\w+|[^\w\s]"""
)
CHAT_TEMPLATE: Final = """\
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>
{% endif %}
{%- for message in messages if message.role != "system" %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}\
<tool_call> {{ call.function | tojson }} </tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""ChatML with the names of the tools, and without system messages: the tiny policy has words for
its world only. Calls are part of the content here; apart from it, in other libraries' messages."""
RESPONSE_TEMPLATE: Final[dict[str, Any]] = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"<\|im_start\|>\s*assistant\s*",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""Tells transformers, and so TRL's own loop, how to read calls in what was written."""

FORMAT: Final = TOOL_FORMATS["hermes"]


class Round(NamedTuple):
    """One round of supervised training."""

    num_steps: int
    learning_rate: float
    hops: tuple[int, ...]
    """How long the questions are; each draws one."""
    top_k: tuple[int, ...]
    """How many facts a search brings up at most; each demonstration draws one."""
    care: float = 1.0
    """Chance of each query to be the right one."""
    haste: float = 0.0
    """Chance after each search to answer, whatever is left to ask."""
    echo: float = 0.0
    """Chance of an answer to name what was searched for instead of what was found."""


_LISTS: Final = (1, 1, 2, 2, 3, 4, 6, 9, 12)
ROUNDS: Final = (
    Round(1000, 3e-3, (1, 2, 2, 3), (1, 2, 3, 4)),
    Round(1500, 3e-3, (1, 2, 3, 4), _LISTS),
    Round(150, 1e-3, (1, 2, 3, 4), _LISTS, care=0.97, haste=0.5, echo=0.9),
)
"""In the last round haste and echo are the rule, so that what is left fails by habit."""
ROPE_THETA: Final = 1e5
"""Leaves two thirds of a head's numbers slow enough to compare words by at any distance here."""
TOKENS_PER_STEP: Final = 2000
NUM_SORTED: Final = 256
"""Demonstrations of like length make a batch; they are sorted by this many."""
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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=START,
        eos_token=END,
        padding_side="left",
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.response_template = RESPONSE_TEMPLATE
    return fast


def make_model(
    tokenizer: PreTrainedTokenizerFast, max_position_embeddings: int = 1024, **changes: Any
) -> Qwen3ForCausalLM:
    """Return the model with random weights from torch's generator; `changes` are of its config."""
    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=max_position_embeddings,
        initializer_range=0.1,  # 0.02 suits wide models; at this width copying is never learned
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **(shape | changes),
    )
    return Qwen3ForCausalLM(config)


def make_copying_model(
    tokenizer: PreTrainedTokenizerFast, seed: int, **changes: Any
) -> Qwen3ForCausalLM:
    """Return the embedded policy before training: its heads can compare words, and some copy."""
    rotary = {"rope_type": "default", "rope_theta": ROPE_THETA}
    model = make_model(tokenizer, head_dim=32, rope_parameters=rotary, **changes)
    put_in_induction_heads(model, torch.Generator().manual_seed(seed))
    return model


def queries(world: World, question: Question) -> list[str]:
    """Return what to search for, hop by hop: what was found last, and what is still asked of it.

    What is asked, a word for each hop, stands in the order of the question.
    """
    path = [world.facts[number] for number in question.gold]
    words = [word_of(world.relations[fact.relation]) for fact in path]
    asked = question.text.split()
    # beside an auxiliary, "works" is "work"
    place = {word: asked.index(word if word in asked else word[:-1]) for word in words}
    return [
        " ".join([fact.subject, *sorted(words[done:], key=place.__getitem__)])
        for done, fact in enumerate(path)
    ]


def word_of(relation: Relation) -> str:
    """Return the word that says the relation."""
    (word,) = {*NOUNS, *VERBS}.intersection(relation.fact.split())
    return word


def demonstrate(
    world: World, question: Question, retriever: Retriever, habits: Round, rng: np.random.Generator
) -> list[Message]:
    """Play a question with the `habits` of a round."""
    top_k = int(rng.choice(habits.top_k))
    messages: list[Message] = [{"role": "user", "content": question.text}]
    for number, query in zip(question.gold, queries(world, question), strict=True):
        fact = world.facts[number]
        if rng.random() >= habits.care:
            relation = world.relations[str(rng.choice(list(world.relations)))]
            query = f"{fact.subject} {word_of(relation)}"
        found = format_hits(retriever.search(query, top_k))
        call = FORMAT.write_call("search", {"query": query})
        messages.append({"role": "assistant", "content": call})
        messages.append({"role": "tool", "name": "search", "content": found})
        if rng.random() < habits.haste:
            break
    answer = fact.subject if rng.random() < habits.echo else fact.object
    messages.append({"role": "assistant", "content": FORMAT.write_answer(answer)})
    return messages


def demonstrations(habits: Round, rng: np.random.Generator) -> Iterator[list[Message]]:
    """Yield demonstrations in made-up languages without end."""
    while True:
        world = invent_world(rng, outdated=bool(rng.random() < 0.5))
        retriever = build_retriever(Corpus(world.passages))
        for _ in range(QUESTIONS_PER_WORLD):
            question = make_question(world, rng, hops=int(rng.choice(habits.hops)))
            yield demonstrate(world, question, retriever, habits, rng)


def encode(tokenizer: Any, messages: list[Message]) -> tuple[list[int], list[bool]]:
    """Return the tokens of a conversation, and which of them the policy writes."""
    ids: list[int] = tokenizer(f"{START}tools search{END}", add_special_tokens=False)["input_ids"]
    written = [False] * len(ids)
    for message in messages:
        header = tokenizer(f"{START}{message['role']}", add_special_tokens=False)["input_ids"]
        body = tokenizer(f"{message['content']}{END}", add_special_tokens=False)["input_ids"]
        ids += header + body
        written += [False] * len(header) + [message["role"] == "assistant"] * len(body)
    return ids, written


def batches(
    habits: Round, tokenizer: Any, rng: np.random.Generator
) -> Iterator[list[tuple[list[int], list[bool]]]]:
    """Yield batches of demonstrations that are alike in length, without end."""
    stream = demonstrations(habits, rng)
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
    """Train `model` on demonstrations, round after round."""
    for number, habits in enumerate(ROUNDS, start=1):
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=habits.learning_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, habits.learning_rate, total_steps=habits.num_steps, pct_start=0.1
        )
        stream = batches(habits, tokenizer, np.random.default_rng([seed, number]))
        label = f"round {number} of {len(ROUNDS)}"
        progress = tqdm(range(habits.num_steps), desc=label, unit="step")
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
    rows = [(torch.tensor(tokens), torch.tensor(written)) for tokens, written in batch]
    ids = pad_sequence([tokens for tokens, _ in rows], True, pad_token_id)
    labels = pad_sequence([tokens.where(written, -100) for tokens, written in rows], True, -100)
    loss: torch.Tensor = model(input_ids=ids, labels=labels).loss
    return loss


def mixture(**changes: Any) -> functools.partial[TextEnv]:
    """Return what makes the environment of the default recipe, in worlds held out of training.

    `changes` take the place of its arguments.
    """
    recipe = yaml.safe_load(RECIPES["default"].read_text(encoding="utf-8"))
    kwargs = recipe["env_kwargs"] | recipe["eval_env_kwargs"] | changes
    return functools.partial(gym.make, recipe["env"], **kwargs)


def measure(model: Any, tokenizer: Any, *, temperature: float, num_tasks: int = 500) -> float:
    """Return the success of a policy in the mixture, one episode each."""
    policy = transformers_policy(model, tokenizer, max_new_tokens=24, temperature=temperature)
    return evaluate_policy(mixture(), policy, range(num_tasks), seed=1).metrics["success"]


def write_card(output: Path, model: Any, sampled: float, greedy: float) -> None:
    """Write the model card: how the policy was made and how well it does."""
    write_text(
        output / "README.md",
        f"""---
license: apache-2.0
---
# The embedded policy of Agent-R1 Gym

A Qwen3-type model of {model.num_parameters():,} parameters with a word-level vocabulary, made from
nothing by `python -m agent_trainers.make_tiny_policy`: supervised training on clean, then on hasty
demonstrations in made-up languages of the words of `AgentR1/SyntheticMultiHop-v0`. By chance one
language in 16 says a fact as the variant `paraphrase` does, and one in 8 as `relations` does. It
knows the words of these worlds only.

Success in 500 held-out worlds of the mixture that the default recipe trains on, before any
reinforcement learning: {sampled:.1%} sampled at temperature 1, {greedy:.1%} greedy.
""",
    )


def make(output: Path, seed: int) -> None:
    """Make the policy, measure it, and save it."""
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
