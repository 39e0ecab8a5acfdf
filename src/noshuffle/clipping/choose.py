"""Pick the engine for a model, and say why.

Ghost clipping costs one plain step plus the norms. Writing gradients out costs memory and time in
proportion to batch × parameters; it is what is left where most parameters are in layers without a
rule, or the model cannot be taken layer by layer. No state.

>>> from torch import nn
>>> type(auto(nn.Linear(1024, 1024))).__name__
'Ghost'
"""

from __future__ import annotations

from torch import nn

from noshuffle.clipping.check import original, trainable, validate
from noshuffle.clipping.ghost import Ghost
from noshuffle.clipping.layers import NotByLayer, read
from noshuffle.clipping.per_example import PerExample


def auto(
    model: nn.Module, *, microbatch: int | None = None, mode: str = "auto"
) -> Ghost | PerExample:
    """The engine for a model; `.why` is the reason in words; `mode`: see `microbatches`."""
    model = original(model)
    validate(model)
    count = sum(p.numel() for p in trainable(model).values())
    try:
        layers = read(model)
    except NotByLayer as reason:
        return _written_out(microbatch, str(reason))
    opaque = sum(
        p.numel() for layer in layers.opaque.values() for p in layer.parameters() if p.requires_grad
    )
    if opaque > count // 2:
        named = ", ".join(sorted({type(layer).__name__ for layer in layers.opaque.values()}))
        return _written_out(microbatch, f"most parameters are in layers without a rule ({named})")
    kinds = sorted({type(m).__name__ for m in (*layers.ruled.values(), *layers.rewritten.values())})
    why = f"{count:,} parameters with layer rules for {', '.join(kinds)}"
    return Ghost(microbatch, why=why, mode=mode)


def _written_out(microbatch: int | None, reason: str) -> PerExample:
    note = f"whole model written out per example: {reason}"
    return PerExample(microbatch, why=note, fallbacks=[note])
