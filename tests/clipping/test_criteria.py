"""Cross entropy of scores whose classes lie last in memory, against torch's own call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, PerExample
from noshuffle.clipping.criteria import ClassesLast, CriteriaByRow, cross_entropy
from noshuffle.clipping.objective import row_losses


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    classes=st.integers(2, 7),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.2]),
    is_weighted=st.booleans(),
    is_moved=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_values_and_gradients_are_those_of_torch(
    sizes: list[int],
    classes: int,
    reduction: str,
    smoothing: float,
    is_weighted: bool,
    is_moved: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    shape = (3, *sizes)
    leaf = torch.randn(*shape, classes, dtype=torch.float64, requires_grad=True)
    scores = leaf.movedim(-1, 1) if is_moved else leaf.movedim(-1, 1).contiguous()
    target = torch.randint(classes, shape)
    target[0] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    if is_weighted:
        options["weight"] = torch.rand(classes, dtype=torch.float64) + 0.1
    slow = F.cross_entropy(scores, target, **options)
    fast = cross_entropy(scores, target, **options)
    with ClassesLast():
        inside = F.cross_entropy(scores, target, **options)
    assert fast.shape == slow.shape
    assert torch.equal(fast, inside)
    assert torch.allclose(fast, slow, rtol=1e-12, atol=1e-12)
    for one in (slow, fast):
        leaf.grad = None
        one.sum().backward(retain_graph=True)
        found = leaf.grad
        assert found is not None
        if one is slow:
            truth = found
    assert torch.allclose(found, truth, rtol=1e-12, atol=1e-12)


def test_scores_are_not_copied() -> None:
    seen: list[Tensor] = []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten._log_softmax.default:
                seen.append(args[0])
            return func(*args, **(kwargs or {}))

    scores = torch.randn(4, 5, 6)
    with Watched():
        cross_entropy(scores.transpose(1, 2), torch.zeros(4, 5, dtype=torch.long))
    assert len(seen) == 1
    assert seen[0].data_ptr() == scores.data_ptr()
    assert seen[0].shape == (20, 6)


@pytest.mark.parametrize(
    ("scores", "target"),
    [
        (torch.randn(3, 5), torch.tensor([0, 4, 2])),
        (torch.randn(3, 2, 5).transpose(1, 2), torch.rand(3, 5, 2)),  # shares of classes
        (torch.randn(3, 5, 2), torch.randint(5, (3, 2))),  # lies as torch wants it
    ],
)
def test_other_input_is_torchs_own_call(scores: Tensor, target: Tensor) -> None:
    assert torch.equal(cross_entropy(scores, target), F.cross_entropy(scores, target))


def test_bad_input_is_told_in_torchs_words() -> None:
    scores, target = torch.randn(3, 2, 5).transpose(1, 2), torch.zeros(3, 4, dtype=torch.long)
    with pytest.raises((RuntimeError, ValueError)) as slow:
        F.cross_entropy(scores, target)
    with pytest.raises(type(slow.value)) as fast, ClassesLast():
        F.cross_entropy(scores, target)
    assert str(fast.value) == str(slow.value)


def tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.transpose(1, 2), y, ignore_index=0)


def test_losses_of_rows_are_those_of_batches_of_one() -> None:
    torch.manual_seed(2)
    out, y = torch.randn(6, 4, 9), torch.randint(1, 9, (6, 4))
    y[2, 1:] = 0
    found = row_losses(tokens, out, (y,))
    each = torch.stack([tokens(out[i : i + 1], y[i : i + 1]) for i in range(6)])
    assert torch.allclose(found, each, rtol=1e-6)
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    turned = row_losses(criterion, out.transpose(1, 2), (y,))
    assert torch.allclose(turned, each, rtol=1e-6)


def test_clipped_sums_agree_with_the_slow_engine() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)).double()
    batch = (torch.randint(9, (5, 3)), torch.randint(1, 9, (5, 3)))
    ghost = Ghost().clipped_sum(model, tokens, batch, clip=Flat(0.5))
    slow = PerExample().clipped_sum(model, tokens, batch, clip=Flat(0.5))
    for name, value in slow.values.items():
        assert torch.allclose(ghost.values[name], value, rtol=1e-10, atol=1e-12)


def test_behind_a_mask_rows_are_not_those_of_the_examples() -> None:
    """As many numbers as examples do not make them theirs."""
    x, y = torch.randn(4, 3), torch.tensor([1, 0, 1, 1, 0, 1, 0, 0, 0, 0, 0, 0]).reshape(4, 3)
    with CriteriaByRow(4):
        assert F.mse_loss(x, torch.zeros(4, 3)).shape == (4,)
    with CriteriaByRow(4):
        assert F.mse_loss(x[y.bool()], torch.zeros(4)).shape == ()
