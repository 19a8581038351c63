"""How chat templates of well-known model families write roles: text before and after a message."""


def turns(user, assistant, end="", system=None, end_of_user=None):
    """Markers of a template whose roles differ in the text before a message only."""
    end_of_user = end if end_of_user is None else end_of_user
    return {
        "system": (user if system is None else system, end_of_user),
        "user": (user, end_of_user),
        "assistant": (assistant, end),
    }


FAMILIES = {
    "ChatML": turns(
        "<|im_start|>user\n", "<|im_start|>assistant\n", "<|im_end|>\n", "<|im_start|>system\n"
    ),
    "Llama 2": turns("[INST] ", "", "</s>", "[INST] <<SYS>>\n", " [/INST] "),
    "Llama 3": turns(
        "<|start_header_id|>user<|end_header_id|>\n\n",
        "<|start_header_id|>assistant<|end_header_id|>\n\n", "<|eot_id|>",
    ),
    "Llama 4": turns(
        "<|header_start|>user<|header_end|>\n\n", "<|header_start|>assistant<|header_end|>\n\n",
        "<|eot|>",
    ),
    "Mistral": turns("[INST] ", "", "</s>", end_of_user=" [/INST]"),
    "Mistral with system prompts": turns(
        "[INST]", "", "</s>", "[SYSTEM_PROMPT]", end_of_user="[/INST]"
    ),
    "Gemma": turns("<start_of_turn>user\n", "<start_of_turn>model\n", "<end_of_turn>\n"),
    "Gemma 4": turns("<|turn>user\n", "<|turn>model\n", "<turn|>\n"),
    "Phi 3": turns("<|user|>\n", "<|assistant|>\n", "<|end|>\n", "<|system|>\n"),
    "Zephyr": turns("<|user|>\n", "<|assistant|>\n", "</s>\n", "<|system|>\n"),
    "Tulu": turns("<|user|>\n", "<|assistant|>\n", "\n", "<|system|>\n"),
    "StableLM": turns("<|USER|>", "<|ASSISTANT|>", "", "<|SYSTEM|>"),
    "OpenAssistant": turns("<|prompter|>", "<|assistant|>", "<|endoftext|>", "<|system|>"),
    "GPT-OSS": turns(
        "<|start|>user<|message|>", "<|start|>assistant<|channel|>final<|message|>", "<|end|>"
    ),
    "DeepSeek": turns(
        "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"
    ),
    "Cohere": turns(
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "GLM": turns("<|user|>\n", "<|assistant|>\n", "", "[gMASK]<sop><|system|>\n"),
    "Granite": turns(
        "<|start_of_role|>user<|end_of_role|>", "<|start_of_role|>assistant<|end_of_role|>",
        "<|end_of_text|>\n",
    ),
    "Nemotron": turns(
        "<extra_id_1>User\n", "<extra_id_1>Assistant\n", "\n", "<extra_id_0>System\n"
    ),
    "Baichuan": turns("<reserved_106>", "<reserved_107>"),
    "Exaone": turns("[|user|]", "[|assistant|]", "[|endofturn|]\n", "[|system|]"),
    "Baize": turns("[|Human|]", "[|AI|]", "\n"),
    "MiniMax": turns("]~b]user\n", "]~b]ai\n", "[e~[\n", "]~b]system\n"),
    "Seed": turns("<seed:bos>user\n", "<seed:bos>assistant\n", "<seed:eos>"),
    "Kimi": turns(
        "<|im_user|>user<|im_middle|>", "<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"
    ),
    "Apertus": turns("<|user_start|>", "<|assistant_start|>", "<|user_end|>"),
    "RedPajama": turns("<human>: ", "<bot>: ", "\n"),
    "TeleChat": turns("<_user>", "<_bot>", "<_end>"),
    "MOSS": turns("<|Human|>: ", "<|MOSS|>: ", "<eoh>\n"),
    "Ling": turns("<role>HUMAN</role>", "<role>ASSISTANT</role>", "", "<role>SYSTEM</role>"),
    "Alpaca": turns("### Instruction:\n", "### Response:\n", "\n\n"),
    "Guanaco": turns("### Human: ", "### Assistant: ", "\n"),
    "Solar": turns("### User:\n", "### Assistant:\n", "\n\n", "### System:\n"),
    "Phind": turns("### User Message\n", "### Assistant\n", "\n\n", "### System Prompt\n"),
    "Vicuna": turns("USER: ", "ASSISTANT: ", "</s>", "SYSTEM: ", " "),
    "OpenChat": turns("GPT4 Correct User: ", "GPT4 Correct Assistant: ", "<|end_of_turn|>\n"),
    "Falcon": turns("User: ", "Falcon: ", "\n", "System: "),
    "Claude 2": turns("\n\nHuman: ", "\n\nAssistant: "),
    "ChatGLM 2": turns("[Round 1]\n\n\u95ee\uff1a", "\n\n\u7b54\uff1a"),
    "Rinna": turns("\u30e6\u30fc\u30b6\u30fc: ", "\u30b7\u30b9\u30c6\u30e0: ", "\n"),
    "Japanese Alpaca": turns("### \u6307\u793a:\n", "### \u5fdc\u7b54:\n", "\n\n"),
    "Korean Alpaca": turns("### \uc9c8\ubb38: ", "### \ub2f5\ubcc0: ", "\n"),
    "Snoozy": turns("### Prompt:\n", "### Response:\n", "\n"),
    "Magicoder": turns("@@ Instruction\n", "@@ Response\n", "\n\n"),
    "Code Llama": turns("<step> Source: user\n\n ", "<step> Source: assistant\n\n ", " "),
    "CodeShell": turns("## human: ", "## assistant: ", "|<end_of_text>|"),
    "Pangu": turns("[unused9]\u7528\u6237\uff1a", "[unused9]\u52a9\u624b\uff1a", "[unused10]"),
    "Xverse": turns("Human: ", "Assistant: ", "<|endoftext|>"),
    "RWKV": turns("User: ", "Assistant: ", "\n\n"),
    "DeepSeek Coder": turns("### Instruction:\n", "### Response:\n", "\n<|EOT|>\n"),
    "InternLM": turns("<|User|>:", "<|Bot|>:", "<eoa>\n", end_of_user="<eoh>\n"),
    "Jamba": turns("<|bom|><|user|> ", "<|bom|><|assistant|> ", "<|eom|>", "<|bom|><|system|> "),
    "Granite Code": turns("Question:\n", "Answer:\n", "\n\n", "System:\n"),
    "Aquila": turns("###Human: ", "###Assistant: ", "</s>", end_of_user=""),
    "Koala": turns("USER: ", "GPT: ", "</s>", end_of_user=" "),
    "KULLM": turns("### \uba85\ub839\uc5b4:\n", "### \uc751\ub2f5:\n", "\n\n"),
}  # fmt: skip
"""By family and role. A tokenizer may have the markers as control tokens, or not."""


def template(markers):
    """Return a Jinja template that writes these markers, as plain text."""
    parts = [
        f"{{% if m.role == {role!r} %}}{{{{ {before!r} + m.content + {after!r} }}}}{{% endif %}}"
        for role, (before, after) in markers.items()
    ]
    prompt = markers["assistant"][0]
    return (
        f"{{% for m in messages %}}{''.join(parts)}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {prompt!r} }}}}{{% endif %}}"
    )
