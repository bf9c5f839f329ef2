"""The outer step against its published arithmetic and torch's own SGD."""

from __future__ import annotations

import pytest
import torch

from moe_fragment.sync import OuterSGD


def test_golden_numbers() -> None:
    """A pseudo-gradient of 1 in every round, from 0: velocity 1, 1.9, 2.71; the update tends to 7."""
    outer = OuterSGD(0.7, 0.9, True)
    weights, velocity = torch.zeros(1), None
    seen = []
    for _ in range(3):
        weights, velocity = outer.step(weights, velocity, torch.ones(1))
        assert velocity is not None
        seen.append((float(velocity), float(weights)))
    assert [v for v, _ in seen] == pytest.approx([1.0, 1.9, 2.71])
    assert [w for _, w in seen] == pytest.approx([-1.33, -3.227, -5.6343])
    for _ in range(200):
        before = weights
        weights, velocity = outer.step(weights, velocity, torch.ones(1))
    assert float(before - weights) == pytest.approx(7.0, rel=1e-4)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.9, False), (0.0, False)])
def test_equals_torch(momentum: float, nesterov: bool) -> None:
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(50))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=momentum, nesterov=nesterov)
    outer = OuterSGD(0.7, momentum, nesterov)
    weights, velocity = parameter.detach().clone(), None
    for _ in range(5):
        gradient = torch.randn(50)
        parameter.grad = gradient.clone()
        optimizer.step()
        weights, velocity = outer.step(weights, velocity, gradient)
        torch.testing.assert_close(weights, parameter.detach(), rtol=1e-6, atol=1e-6)


def test_gives_new_tensors() -> None:
    """A merge that is refused afterwards must not have changed anything."""
    weights, velocity, gradient = torch.ones(3), torch.ones(3), torch.ones(3)
    OuterSGD().step(weights, velocity, gradient)
    for tensor in (weights, velocity, gradient):
        assert torch.equal(tensor, torch.ones(3))


def test_zero_rate_reverts() -> None:
    weights, _ = OuterSGD(0.0, 0.0).step(torch.tensor([2.0]), None, torch.tensor([5.0]))
    assert weights == 2.0
