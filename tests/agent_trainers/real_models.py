"""Small models of real types with real chat templates, random weights, saved to a folder."""

import importlib.resources

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
TEXT = ["Answer the question. Search for what you need, one fact after the other."] * 20


def template(name):
    return importlib.resources.files("trl").joinpath(f"chat_templates/{name}.jinja").read_text()


def make_tokenizer(template_name):
    """A byte-level BPE tokenizer with the tokens and the chat template of a Qwen model."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        TEXT,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet,
                            show_progress=False),
    )  # fmt: skip
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_tokens(MARKUP)
    fast.chat_template = template(template_name)
    return fast


def save_model(folder, template_name, **sizes):
    """Save a model with random weights; its type goes with the template."""
    tokenizer = make_tokenizer(template_name)
    is_qwen3 = template_name.startswith("qwen3")
    config = (Qwen3Config if is_qwen3 else Qwen2Config)(
        vocab_size=len(tokenizer), intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
        **{"hidden_size": 32, **({"head_dim": 16} if is_qwen3 else {}), **sizes},
    )  # fmt: skip
    (Qwen3ForCausalLM if is_qwen3 else Qwen2ForCausalLM)(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
