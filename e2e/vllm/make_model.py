#!/usr/bin/env python3
"""Writes a tiny random Llama (weights, byte-level BPE tokenizer, chat template) that needs no model hub.

usage: make_model.py DIRECTORY [agent]

Two layers with large random weights: greedy text is gibberish, but it depends on every token of the prompt, so KV blocks that
were lost, stale, or somebody else's show as different text. Everything is seeded: the same model on every machine.
agent: its tokenizer also has the tags of reasoning and of tool calls, as tokens that are not special.
"""
import json
import random
import sys

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4096
AGENT = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] if m['content'] is string"
    " else m['content']|map(attribute='text')|join('')) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def sentences(seed: int, count: int):
    """Invented words in sentences: a few that are frequent and many that are rare, as in a language."""
    rng = random.Random(seed)
    onset = ["b", "br", "c", "ch", "d", "f", "g", "gr", "h", "k", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "th", "tr", "v", "w"]
    nucleus = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
    coda = ["", "", "l", "m", "n", "r", "s", "t", "nd", "st", "ck"]
    words = ["".join(rng.choice(p) for _ in range(rng.randint(1, 3)) for p in (onset, nucleus, coda)) for _ in range(6000)]
    weights = [1 / (rank + 1) for rank in range(len(words))]
    for number in range(count):
        chosen = rng.choices(words, weights, k=rng.randint(5, 15))
        chosen.append(str(number))
        yield " ".join(chosen).capitalize() + ".\n"


def tokenizer(agent: bool) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly VOCABULARY tokens: every id that the model can emit has a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL + [AddedToken(tag, special=False) for tag in AGENT if agent],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(sentences(seed=7, count=20000), trainer)
    if bpe.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"tokenizer: {bpe.get_vocab_size()} tokens, want {VOCABULARY}")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token="<pad>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=8192,
            bos_token_id=1,
            eos_token_id=4,
            pad_token_id=5,
            tie_word_embeddings=False,
            initializer_range=0.2,
            rope_theta=10000.0,
        )
    )


def main() -> None:
    if len(sys.argv) not in (2, 3) or sys.argv[2:] not in ([], ["agent"]):
        raise SystemExit(__doc__)
    directory = sys.argv[1]
    tokenizer(len(sys.argv) == 3).save_pretrained(directory)
    llama = model()
    llama.save_pretrained(directory, safe_serialization=True)
    print(json.dumps({"directory": directory, "parameters": sum(p.numel() for p in llama.parameters())}))


if __name__ == "__main__":
    main()
