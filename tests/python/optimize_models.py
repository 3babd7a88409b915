"""Small models for the tests of optimize: Hugging Face's from configurations, nothing downloaded."""

from __future__ import annotations

import torch

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=96)
IDS = (2, 11)


def ids():
    return torch.randint(0, 96, IDS)


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SIZES, num_key_value_heads=2, max_position_embeddings=64)
    return LlamaForCausalLM(config), {"input_ids": ids(), "use_cache": False}


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=96, n_positions=64)
    return GPT2LMHeadModel(config), {"input_ids": ids(), "use_cache": False}


def bert():
    from transformers import BertConfig, BertModel

    mask = torch.ones(IDS, dtype=torch.int64)
    mask[1, 7:] = 0
    return BertModel(BertConfig(**SIZES, max_position_embeddings=64)), {"input_ids": ids(), "attention_mask": mask}


def t5(feed_forward="gated-gelu"):
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=96, feed_forward_proj=feed_forward
    )
    return T5ForConditionalGeneration(config), {"input_ids": ids(), "decoder_input_ids": ids(), "use_cache": False}


def vit():
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
    )
    return ViTModel(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def gemma():
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(**SIZES, num_key_value_heads=1, head_dim=8, max_position_embeddings=64)
    return GemmaForCausalLM(config), {"input_ids": ids(), "use_cache": False}


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64
    )
    return MixtralForCausalLM(config), {"input_ids": ids(), "use_cache": False}


HUGGING_FACE = {"llama": llama, "gpt2": gpt2, "bert": bert, "t5": t5, "vit": vit, "gemma": gemma, "mixtral": mixtral}
