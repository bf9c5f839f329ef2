"""FragmentMoe: a single-device mixture-of-experts decoder with Qwen3-MoE's parameter names and layout.

What differs from it is the routing (`router.py`), and that the balance losses belong to each layer and reach
the loss by default. Nothing here knows about clusters.

Shapes: `B` batch, `S` sequence, `T` tokens (B * S), `D` model width, `E` experts, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from moe_fragment.models.configuration import FragmentMoeConfig
from moe_fragment.models.layers import (
    FragmentMoeAttention,
    FragmentMoeDecoderLayer,
    FragmentMoeExperts,
    FragmentMoeRMSNorm,
    FragmentMoeRotaryEmbedding,
)
from moe_fragment.models.router import FragmentMoeRouter


@dataclass
class FragmentMoeModelOutput(MoeModelOutputWithPast):
    """`MoeModelOutputWithPast` and the summed auxiliary loss of the layers (a scalar, or None)."""

    aux_loss: Tensor | None = None


class FragmentMoePreTrainedModel(PreTrainedModel):
    """Loading, saving, initialisation, and what the architecture supports."""

    config: FragmentMoeConfig
    config_class = FragmentMoeConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar = ["FragmentMoeDecoderLayer"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict: ClassVar = ["e_score_correction_bias"]
    _can_record_outputs: ClassVar = {
        "router_logits": OutputRecorder(FragmentMoeRouter, index=0),
        "hidden_states": FragmentMoeDecoderLayer,
        "attentions": FragmentMoeAttention,
    }

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        # transformers decides by searching the source of the module that defines `cls`, which is wrong for a
        # subclass in another file: it would silently run "eager".
        return True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, FragmentMoeExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, FragmentMoeRouter):
            init.normal_(module.weight, mean=0.0, std=std)
            init.zeros_(module.tokens_per_expert)
            if module.e_score_correction_bias is not None:
                init.zeros_(module.e_score_correction_bias)


class FragmentMoeModel(FragmentMoePreTrainedModel):
    """The decoder without its head."""

    def __init__(self, config: FragmentMoeConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            FragmentMoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)
        )
        self.norm = FragmentMoeRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = FragmentMoeRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        **kwargs: Any,
    ) -> FragmentMoeModelOutput:
        """Run the layers.

        Args:
            input_ids: [B, S] tokens; or inputs_embeds: [B, S, D].
            attention_mask: [B, S + cached] with 0 for padding on either side; or a ready-made mask of the
                attention implementation (then no token is taken for padding).
            position_ids: [B or 1, S]; default: counted on from the cache.
            cache: filled in place; use_cache makes one where none is given.
            output_router_logits: also return raw router logits, [T, E] of each MoE layer.

        Returns:
            last_hidden_state [B, S, D], cache, aux_loss (in training, or with output_router_logits), and what
            was asked for of hidden_states, attentions, router_logits.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        hidden_BSD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        length = hidden_BSD.shape[1]
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = (torch.arange(length, device=hidden_BSD.device) + seen).unsqueeze(0)
        causal_mask = create_causal_mask(
            config=self.config,
            inputs_embeds=hidden_BSD,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        position_embeddings = self.rotary_emb(hidden_BSD, position_ids=position_ids)
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        with_aux = self.training or output_router_logits
        # Decided here, outside the layers: under reentrant checkpointing they run without grad in a training
        # step too.
        count_load = self.training and torch.is_grad_enabled()
        token_mask = _token_mask(attention_mask, length) if with_aux or count_load else None

        aux_losses = []
        for layer in self.layers:
            hidden_BSD, aux_loss = layer(
                hidden_BSD,
                attention_mask=causal_mask,
                position_embeddings=position_embeddings,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                token_mask=token_mask,
                with_aux=with_aux,
                count_load=count_load,
                **kwargs,
            )
            if aux_loss is not None:
                aux_losses.append(aux_loss.to(hidden_BSD.device))
        return FragmentMoeModelOutput(
            last_hidden_state=self.norm(hidden_BSD),
            cache=cache,
            aux_loss=torch.stack(aux_losses).sum() if aux_losses else None,
        )


class FragmentMoeForCausalLM(FragmentMoePreTrainedModel, GenerationMixin):
    """The decoder with a language-model head, tied to the embedding if `config.tie_word_embeddings`."""

    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: FragmentMoeConfig) -> None:
        super().__init__(config)
        self.model = FragmentMoeModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Next-token logits, and losses.

        Args:
            labels: [B, S], shifted here; -100 bears no loss.
            logits_to_keep: only the last so many positions (0: all), or their indices.
            num_items_in_batch (keyword): loss-bearing tokens of the whole step, over micro-batches and ranks.
                The returned loss is then this call's share of the step's loss, of the auxiliary loss as well,
                whose weight must not grow with the number of ranks or micro-batches.
            (others): as in `FragmentMoeModel.forward`.

        Returns:
            logits [B, S, V]; aux_loss, the sum over MoE layers of weighted balance and z-losses, given in
            training with or without labels (and in evaluation if router logits are asked for); loss = mean
            cross-entropy, plus aux_loss in training; cache, router_logits and the other captured outputs.
        """
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.vocab_size, **kwargs)
            if self.training and outputs.aux_loss is not None:
                loss = loss + outputs.aux_loss.to(loss.device) * _share_of_step(labels, **kwargs)
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=outputs.aux_loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            router_logits=outputs.router_logits,
        )


def _token_mask(attention_mask: Any, length: int) -> Tensor | None:
    """[B, S] bool from a 2-D attention mask, which may also cover cached positions; None for others."""
    if not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2:
        return None
    return attention_mask[:, -length:].bool()


def _share_of_step(
    labels: Tensor, num_items_in_batch: Tensor | int | None = None, **_: Any
) -> Tensor | float:
    if num_items_in_batch is None:
        return 1.0
    return (labels[..., 1:] != -100).sum() / num_items_in_batch
