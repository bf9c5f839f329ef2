"""Make `transformers` know the model type "moe_fragment": Auto classes and the layout of checkpoints on disk.

Importing this module registers; doing it again changes nothing.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)

from moe_fragment.models.configuration import FragmentMoeConfig
from moe_fragment.models.modeling import FragmentMoeForCausalLM, FragmentMoeModel


def register() -> None:
    """Register the configuration, both models, and one tensor per expert on disk, as Qwen3-MoE stores them.

    Without the mapping transformers skips conversion for classes outside its own package: saved files would
    hold stacked experts that no stock class reads, and loading a per-expert file would leave experts at
    random.
    """
    name = FragmentMoeConfig.model_type
    AutoConfig.register(name, FragmentMoeConfig, exist_ok=True)
    AutoModel.register(FragmentMoeConfig, FragmentMoeModel, exist_ok=True)
    AutoModelForCausalLM.register(FragmentMoeConfig, FragmentMoeForCausalLM, exist_ok=True)
    mapping = get_checkpoint_conversion_mapping("qwen2_moe")
    assert mapping is not None, "transformers no longer knows the per-expert layout of Qwen2-MoE"
    register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


register()
