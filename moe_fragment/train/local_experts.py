"""Experts that one rank of a cluster holds alone: master weights, gradients and Adam, out of DeepSpeed's sight.

Where a cluster's experts are spread over its ranks, each gets the gradient of every token where it lives, so there is
nothing to reduce, and nobody else to partition its state with. DeepSpeed would do both, or refuse (its own MoE under
ZeRO-3), and would broadcast the first rank's experts to all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from moe_fragment.models.fragment import ExpertLayer, Fragmented


class LocalExperts:
    """One flat fp32 buffer for all that are trained, experts one after the other.

    Args:
        fragmented: a model whose experts are spread over the cluster's ranks.
        device: where they are trained.
        dtype: in which they compute.
        learning_rate, betas, eps, weight_decay: of AdamW.
    """

    def __init__(
        self,
        fragmented: Fragmented,
        device: torch.device,
        dtype: torch.dtype,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        self.fragmented = fragmented
        self._parts: dict[str, slice] = {}
        at = 0
        for name, _, parameter in fragmented.stacked():
            parameter.data = parameter.data.to(device, dtype)
            if parameter.requires_grad:
                self._parts[name] = part = slice(at, at + parameter.numel())
                at = part.stop
                parameter.register_post_accumulate_grad_hook(self._collector(part))
        # From rounded weights, as DeepSpeed's, so that copies of an expert agree whoever trains them.
        flats = [parameter.detach().float().reshape(-1) for _, _, parameter in self._trained()]
        self.master = nn.Parameter(torch.cat(flats) if flats else torch.empty(0, device=device))
        self.gradient = torch.zeros_like(self.master.detach())
        self.optimizer = torch.optim.AdamW(
            [self.master], lr=learning_rate, betas=betas, eps=eps, weight_decay=weight_decay
        )

    def _collector(self, part: slice) -> object:
        def collect(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            self.gradient[part] += parameter.grad.reshape(-1)
            parameter.grad = None

        return collect

    def _trained(self) -> Iterator[tuple[str, ExpertLayer, nn.Parameter]]:
        return (stack for stack in self.fragmented.stacked() if stack[0] in self._parts)

    def layout(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Of each stack: name, global ids of its experts, elements of one, and where they begin in the buffers."""
        for name, layer, parameter in self._trained():
            yield name, self.fragmented.held(layer), parameter.shape[1:].numel(), self._parts[name].start

    def step(self) -> None:
        """Adam with the gradient there is; then the next step's is collected."""
        self.master.grad = self.gradient
        self.optimizer.step()
        self.master.grad = None
        self.gradient.zero_()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Make the model's experts follow the master weights."""
        for name, _, parameter in self._trained():
            parameter.data.copy_(self.master[self._parts[name]].view_as(parameter))
