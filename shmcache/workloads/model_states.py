"""What one recurrent layer keeps, whichever family its config belongs to.

Why: the families name the same few widths differently, and the state is what a sequence costs
whose length does not matter.
"""

from __future__ import annotations

from shmcache.workloads.config_fields import Fields
from shmcache.workloads.geometries import StateLayers

_HEADS = ("mamba_num_heads", "mamba_n_heads", "n_mamba_heads")


def state_layer(fields: Fields) -> StateLayers:
    """One layer. Errors: WorkloadError.ConfigUnsupported for a family that is not known here."""
    if fields.has("linear_num_value_heads"):
        return _gated_delta(fields)
    if fields.has("conv_L_cache"):
        return StateLayers(1, fields.needed("hidden_size") * fields.needed("conv_L_cache"), 0)
    if fields.model_type == "mamba2" or any(map(fields.has, _HEADS)):
        return _heads_of_states(fields)
    if fields.has("mamba_d_state") or fields.has("state_size"):
        return _one_state(fields)
    raise fields.unsupported("layer_types", "the state of its recurrent layers is not known here")


def _gated_delta(fields: Fields) -> StateLayers:
    """Qwen3-Next and later."""
    keys = fields.needed("linear_num_key_heads") * fields.needed("linear_key_head_dim")
    heads, width = fields.needed("linear_num_value_heads"), fields.needed("linear_value_head_dim")
    convolved = (2 * keys + heads * width) * fields.needed("linear_conv_kernel_dim")
    return StateLayers(1, convolved, heads * fields.needed("linear_key_head_dim") * width)


def _heads_of_states(fields: Fields) -> StateLayers:
    """Mamba-2: Nemotron-H, Bamba, Granite hybrids, Falcon-H1, Zamba2."""
    heads = fields.needed(*_HEADS, "num_heads")
    width = fields.needed("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")
    state = fields.needed("ssm_state_size", "mamba_d_state", "state_size")
    groups = fields.needed("mamba_n_groups", "mamba_ngroups", "n_groups")
    kernel = fields.needed("conv_kernel", "mamba_d_conv")
    return StateLayers(1, (heads * width + 2 * groups * state) * kernel, heads * width * state)


def _one_state(fields: Fields) -> StateLayers:
    """Mamba-1: Jamba and its kin."""
    expanded = fields.needed("mamba_expand", "expand") * fields.needed("hidden_size")
    kernel = fields.needed("mamba_d_conv", "conv_kernel")
    state = fields.needed("mamba_d_state", "state_size")
    return StateLayers(1, expanded * kernel, expanded * state)
