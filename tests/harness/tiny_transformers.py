"""Models of the transformers library, tiny, without dropout and without weights to
download.
"""

import pytest
import torch

from harness.oracle import randint, randn

ROWS = 6

_NAMES = [
    (50, "vocab_size"),
    (16, "hidden_size n_embd d_model dim embedding_size emb_dim"),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers num_decoder_layers "
        "encoder_layers",
    ),
    (
        2,
        "decoder_layers num_attention_heads n_head n_heads num_heads "
        "encoder_attention_heads",
    ),
    (2, "decoder_attention_heads num_key_value_heads"),
    (8, "head_dim d_kv"),
    (4, "rotary_dim"),
    (20, "intermediate_size encoder_ffn_dim decoder_ffn_dim hidden_dim d_ff"),
    (64, "max_position_embeddings n_positions"),
    (0, "pad_token_id decoder_start_token_id"),
    (1, "bos_token_id"),
    (2, "eos_token_id"),
    # images
    (16, "image_size"),
    (4, "patch_size"),
    # mixtures of experts
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k"),
    (
        12,
        "moe_intermediate_size shared_expert_intermediate_size "
        "shared_intermediate_size",
    ),
    (1, "first_k_dense_replace n_group topk_group"),
    (8, "kv_lora_rank q_lora_rank v_head_dim"),
    (4, "qk_rope_head_dim qk_nope_head_dim"),
    # state spaces
    (1, "expand mamba_expand n_groups mamba_n_groups"),
    (2, "mamba_n_heads mamba_num_heads linear_num_key_heads linear_num_value_heads"),
    (8, "mamba_d_head mamba_head_dim mamba_headdim d_inner linear_key_head_dim"),
    (8, "linear_value_head_dim"),
    (4, "state_size ssm_state_size mamba_d_state chunk_size mamba_chunk_size"),
]
SIZES = {"use_cache": False}
for size, names in _NAMES:
    SIZES |= dict.fromkeys(names.split(), size)
OFF = ("drop", "jitter")


def tiny_config(name):
    """The library's configuration with small sizes; skips where the library has no such
    model.
    """
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, f"{name}Config", None)
    if kind is None or not hasattr(transformers, f"{name}Model"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}Model")
    known = vars(kind()).keys() | kind.attribute_map.keys()
    sizes = {key: size for key, size in SIZES.items() if key in known}
    if "qk_rope_head_dim" in sizes:  # the positions turn what their embedding has
        sizes.pop("head_dim", None)
    config = kind(**sizes)
    for key, value in vars(config).items():
        is_off = any(word in key for word in OFF)
        if is_off and isinstance(value, float):
            setattr(config, key, 0.0)
    # The kernel that the library takes for experts, torch's grouped_mm, refuses
    # float64.
    config._experts_implementation = "eager"
    return config


def tiny(name, device="cpu"):
    """The library's ``{name}Model``, in training mode."""
    import transformers

    config = tiny_config(name)
    with torch.device(device):
        model = getattr(transformers, f"{name}Model")(config)
    return model.train()


def inputs_of(model):
    """A batch of ``ROWS`` rows, by the names of the model's arguments."""
    config = model.config
    if model.main_input_name == "pixel_values":
        size = config.image_size
        if not isinstance(size, int):
            size = size[0]
        return {"pixel_values": randn(ROWS, config.num_channels, size, size)}
    inputs = {"input_ids": randint(47, ROWS, 8) + 3}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = randint(47, ROWS, 5, seed=1) + 3
    return inputs
