"""Self-distillation from a teacher that knows a skill, on the embedded policy."""

import dataclasses
import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from agent_envs import ConfigurationError
from agent_trainers.algorithms.advantages import estimate
from agent_trainers.batching.micro_batch import select_rows
from agent_trainers.experimental.skills import best_other, distillation_loss, find_success
from tests.agent_trainers.gradients import assert_close, gradient, micro_batches

DISTILLATION = "agent_trainers.experimental.skills:SkillDistillation"


@pytest.fixture
def make_trainer(make_trainer):
    def make(weight=0, **changes):
        if weight:
            changes["extensions"] = json.dumps({DISTILLATION: {"weight": weight}})
        return make_trainer(**changes)

    return make


def score(trajectory, success):
    """The trajectory as if it had ended so; success earns 1, failure nothing."""
    last = dataclasses.replace(trajectory.transitions[-1], reward=float(success))
    metrics = {**trajectory.metrics, "success": float(success)}
    steps = [*trajectory.transitions[:-1], last]
    return dataclasses.replace(trajectory, metrics=metrics, transitions=steps)


@pytest.fixture
def scored(played):
    """Two groups of four: in the first members 1 and 2 succeed, in the second only member 0."""
    return [score(t, i in (1, 2, 4)) for i, t in enumerate(played)]


@pytest.fixture
def shown(scored):
    """Whose actions the teacher of each episode is shown, None for nobody's."""
    best, other = sorted((1, 2), key=lambda i: (-scored[i].return_, len(scored[i].transitions)))
    return [best, best, best, best, None, 4, 4, 4] if best == 2 else [1, other, 1, 1, None, 4, 4, 4]


def note(tokenizer, trajectory):
    text = "What worked before: " + " ".join(t.action for t in trajectory.transitions)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def reference_gradient(trainer, tokenizer, scored, shown, weight):
    """Each step by itself through the plain model, its teacher's logits taken with no gradient."""
    model = trainer.model.eval()
    advantages = estimate("grpo_step", scored)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.zero_grad()
    num_tokens = sum(len(t.completion_ids) for episode in scored for t in episode.transitions)
    for i, episode in enumerate(scored):
        first = list(episode.transitions[0].prompt_ids)
        place = max(j for j, token in enumerate(first) if token == end)
        for step, t in enumerate(episode.transitions):

            def logprobs(prompt_ids, ids=tuple(t.completion_ids)):
                logits = model(torch.tensor([[*prompt_ids, *ids]])).logits[0].log_softmax(-1)
                return logits[len(prompt_ids) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]

            policy = logprobs(t.prompt_ids)
            loss = -(1 - weight) * float(advantages[i][step]) * policy.sum()
            if shown[i] is not None:
                hint = note(tokenizer, scored[shown[i]])
                with torch.no_grad():
                    teacher = logprobs([*t.prompt_ids[:place], *hint, *t.prompt_ids[place:]])
                    excess = policy - teacher
                loss = loss + weight * (excess * policy).sum()
            (loss / num_tokens).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize(("weight", "merge_steps"), [(0.3, True), (1.0, False)])
def test_the_gradient_is_that_of_each_step_by_itself(
    make_trainer, tokenizer, scored, shown, weight, merge_steps
):
    trainer = make_trainer(advantage_estimator="grpo_step", weight=weight)
    (batch,) = micro_batches(trainer, scored, merge_steps=merge_steps)
    taught = batch["skill_mask"].any(dim=1)  # all of an action is taught or nothing of it
    assert batch["skill_mask"][taught].equal(batch["action_mask"][taught])
    ours = gradient(trainer, [batch])
    expected = reference_gradient(trainer, tokenizer, scored, shown, weight)
    assert expected.abs().max() > 1e-2
    assert_close(ours, expected)


def test_the_teachers_say_on_older_samples_is_weighed_with_their_bounded_ratio(
    make_trainer, scored
):
    trainer = make_trainer(weight=1.0, num_iterations=2)
    (batch,) = micro_batches(trainer, scored)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.add_(0.02 * torch.sign(parameter))  # the policy moves, its teacher stays
    ours = gradient(trainer, [batch])
    trainer.model.zero_grad()
    whole = select_rows(batch, range(len(batch["prompt_ids"])))
    logprobs = whole.expand(trainer.scorer.score(trainer.model, whole).logprobs)
    ratio = (logprobs.detach() - batch["old_per_token_logps"]).exp()
    assert (ratio * batch["skill_mask"]).max() > 2.0
    loss = ratio.clamp(max=2) * (logprobs.detach() - batch["teacher_per_token_logps"]) * logprobs
    (loss * batch["skill_mask"] * batch["loss_weights"]).sum().backward()
    expected = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    assert_close(ours, torch.cat(expected))


def test_only_the_teacher_reads_skills(make_trainer, tokenizer):
    plain, taught = make_trainer(), make_trainer(weight=1.0)
    read, look = [], taught.scorer.evaluate_logprobs
    taught.scorer.evaluate_logprobs = lambda policy, batch, **at: (
        read.append(batch) or look(policy, batch, **at)
    )
    episodes = []
    for trainer in (plain, taught):
        trainer.train()
        episodes.append(trainer.trajectories["train"])
    assert [t.transitions for t in episodes[0]] == [t.transitions for t in episodes[1]]
    heading = tokenizer("What worked before:", add_special_tokens=False)["input_ids"]
    assert all(
        "worked" not in m["content"] for t in episodes[1] for m in t.transitions[-1].messages
    )
    (batch,) = read
    prompts = [" ".join(map(str, ids)) for ids in batch["prompt_ids"].tolist()]
    assert prompts
    assert all(" ".join(map(str, heading)) in prompt for prompt in prompts)
    taught.evaluate(eval_dataset=Dataset.from_dict({"task": [0, 1]}))
    assert len(read) == 1  # none in evaluation


def test_no_episode_is_shown_itself_nor_a_failure(scored, shown):
    successes = [s for i, t in enumerate(scored) if (s := find_success(t, i))]
    assert [s.number for s in successes] == [1, 2, 4]
    skills = [best_other(successes, t.group_id, i) for i, t in enumerate(scored)]
    told = {s.number: s.skill for s in successes}
    steps = [
        dataclasses.replace(t, action=f"<think>hm</think> {t.action}")
        for t in scored[1].transitions
    ]
    assert find_success(dataclasses.replace(scored[1], transitions=steps), 1) == successes[0]
    assert skills == [None if i is None else told[i] for i in shown]


def test_a_row_without_room_for_the_skill_has_no_teacher(make_trainer, scored):
    trainer = make_trainer(weight=0.5)
    trainer.extensions[0]._skills = lambda trajectories: ["search " * 2000] * len(trajectories)
    (batch,) = micro_batches(trainer, scored)
    assert not batch["skill_mask"].any()


def test_weights_and_templates_that_cannot_teach_are_refused(make_trainer, tokenizer):
    with pytest.raises(ConfigurationError, match="weight must be in"):
        make_trainer(weight=1.5)
    # it hides where a message ends
    tokenizer.chat_template = "{{ tools }} {% for m in messages %}{{ m.content }} {% endfor %}"
    with pytest.raises(ConfigurationError, match="SkillDistillation"):
        make_trainer(weight=0.5)


def test_an_adapters_teacher_has_its_adapter_on(make_trainer, scored):
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False)
    trainer = make_trainer(weight=1.0, peft_config=lora, max_logprob_drift=None, beta=0.1)
    (batch,) = micro_batches(trainer, scored)
    taught = batch["teacher_per_token_logps"][batch["skill_mask"].bool()]
    with trainer.model.disable_adapter():
        (other,) = micro_batches(trainer, scored)
    assert (taught - other["teacher_per_token_logps"][other["skill_mask"].bool()]).abs().max() > 0.1
    assert gradient(trainer, [batch]).abs().max() > 1e-3


def test_distillation_is_trls_sdpo_on_sampled_tokens_with_its_bounded_ratio():
    from trl.experimental.sdpo.loss_utils import (
        apply_importance_sampling_clipping,
        compute_sampled_token_self_distillation_loss,
    )

    rng = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(2, 5, 7, generator=rng) for _ in range(2))
    student.requires_grad_()
    tokens = torch.randint(7, (2, 5), generator=rng)

    ours, taught = (
        x.log_softmax(-1).gather(2, tokens[..., None])[..., 0] for x in (student, teacher)
    )
    old = ours.detach() + torch.randn(2, 5, generator=rng)
    theirs = compute_sampled_token_self_distillation_loss(
        student, teacher, tokens, distillation_alpha=1.0
    )
    theirs = apply_importance_sampling_clipping(theirs, ours, old, clip_coeff=2.0)
    loss = distillation_loss(ours, old, taught)
    assert_close(loss, theirs)
    assert_close(
        *(torch.autograd.grad(x.sum(), student, retain_graph=True)[0] for x in (loss, theirs))
    )
