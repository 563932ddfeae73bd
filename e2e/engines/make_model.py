"""Writes a tiny Qwen2-shaped model with fixed pseudo-random weights into a folder.

It owns config.json, generation_config.json and model.safetensors; the tokenizer files come from elsewhere. The answers are
noise, but the same noise on every machine, and everything around the weights (tokenizer, chat template, KV cache, events) is real.

usage: make_model.py FOLDER
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import save_file

VOCAB = 151_936  # Qwen2.5's, because the tokenizer is Qwen2.5's
HIDDEN = 64
LAYERS = 2
HEADS = 2
KV_HEADS = 1
HEAD_DIM = 32  # the smallest that vLLM's CPU attention takes
INNER = 128
END_OF_TEXT, TURN_END = 151_643, 151_645


def config():
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "initializer_range": 0.02,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": END_OF_TEXT,
        "eos_token_id": TURN_END,
    }


def weights():
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return (torch.randn(*shape, generator=generator) * 0.05).to(torch.bfloat16)

    ones = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {"model.embed_tokens.weight": noise(VOCAB, HIDDEN), "model.norm.weight": ones.clone()}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            tensors[f"{prefix}.self_attn.{name}_proj.weight"] = noise(heads * HEAD_DIM, HIDDEN)
            tensors[f"{prefix}.self_attn.{name}_proj.bias"] = noise(heads * HEAD_DIM)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = noise(HIDDEN, HEADS * HEAD_DIM)
        tensors[f"{prefix}.mlp.gate_proj.weight"] = noise(INNER, HIDDEN)
        tensors[f"{prefix}.mlp.up_proj.weight"] = noise(INNER, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = noise(HIDDEN, INNER)
        tensors[f"{prefix}.input_layernorm.weight"] = ones.clone()
        tensors[f"{prefix}.post_attention_layernorm.weight"] = ones.clone()
    return tensors


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(), indent=1))
    (folder / "generation_config.json").write_text(
        json.dumps({"bos_token_id": END_OF_TEXT, "eos_token_id": [TURN_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False})
    )
    save_file(weights(), str(folder / "model.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    main()
