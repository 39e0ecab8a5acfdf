"""Both engines against the one-example-at-a-time loop, for every layer and for random networks."""

import copy
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.clipping.twin import flat, loop
from torch import nn
from torch.nn import functional as F

from noshuffle.clipping import Flat, Ghost, PerExample, PerLayer

ENGINES = {"per_example": PerExample, "ghost": Ghost, "isolated": partial(Ghost, isolate=True)}


def assert_same(got, truth, norms, tolerance):
    assert list(got.values) == list(truth)
    a, b = flat(got.values), flat(truth)
    assert float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-12
    torch.testing.assert_close(got.norms, norms, rtol=max(tolerance, 1e-6), atol=1e-12)


class Tail(nn.Module):
    """Any layer, then its first tensor flattened."""

    def __init__(self, layer, call=None):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        out = self.call(self.layer, x) if self.call else self.layer(x)
        out = out[0] if isinstance(out, tuple) else out
        return torch.tanh(out).reshape(x.shape[0], -1)


class Patches(nn.Module):
    """Patches of an image with a token in front and places added: parameters beside a layer."""

    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(1, 3, 2, 2)
        self.token, self.places = nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        h = self.cut(x).flatten(2).mT
        return torch.cat([self.token.expand(len(x), 1, 3), h], 1) + self.places


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def self_attend(layer, x):
    return layer(x, x, x)


def cross_attend(layer, x):
    return layer(x[:, :2], x, x.flip(1), need_weights=False)


def masked_attend(layer, x):
    mask = torch.triu(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool), 1)
    padding = torch.zeros(x.shape[:2], dtype=torch.bool)
    padding[:, -1] = True
    return layer(x, x, x, key_padding_mask=padding, attn_mask=mask)


def time_first(layer, x):
    out = layer(x.transpose(0, 1))
    return (out[0] if isinstance(out, tuple) else out).transpose(0, 1)


def with_state(layer, x):
    h = x.mean(1).new_ones(layer.num_layers, x.shape[0], layer.hidden_size) / 3
    return layer(x, (h, h) if isinstance(layer, nn.LSTM) else h)


def cells(layer, x):
    state = None
    for t in range(x.shape[1]):
        state = layer(x[:, t], state)
    return state[0] if isinstance(state, tuple) else state


def merged(layer, x):
    return layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def ids(*shape):
    return torch.randint(0, 5, shape)


LAYERS = {
    "linear": lambda: (Tail(nn.Linear(3, 4)), double(6, 3)),
    "linear no bias": lambda: (Tail(nn.Linear(3, 4, bias=False)), double(6, 3)),
    "linear sequence": lambda: (Tail(nn.Linear(3, 4)), double(6, 5, 3)),
    "linear long sequence": lambda: (Tail(nn.Linear(2, 2)), double(6, 15, 2)),
    "linear wide": lambda: (Tail(nn.Linear(30, 40)), double(6, 2, 30)),
    "linear 5-d": lambda: (Tail(nn.Linear(3, 2)), double(6, 2, 2, 3, 3)),
    "linear flattened": lambda: (Tail(nn.Linear(3, 2), merged), double(6, 4, 3)),
    "linear time first": lambda: (Tail(nn.Linear(3, 2), time_first), double(6, 6, 3)),
    "conv1d": lambda: (Tail(nn.Conv1d(2, 3, 3, stride=2, padding=1)), double(5, 2, 9)),
    "conv2d": lambda: (Tail(nn.Conv2d(2, 3, 3, padding=1, bias=False)), double(5, 2, 6, 6)),
    "conv2d wide": lambda: (Tail(nn.Conv2d(8, 9, 3)), double(5, 8, 4, 4)),
    "conv2d one window": lambda: (Tail(nn.Conv2d(2, 3, 4)), double(5, 2, 4, 4)),
    "conv2d strided": lambda: (Tail(nn.Conv2d(1, 4, (3, 2), stride=(2, 3))), double(5, 1, 8, 8)),
    "conv2d grouped": lambda: (
        Tail(nn.Conv2d(4, 6, 3, groups=2, dilation=(2, 1), padding=(1, 2))),
        double(5, 4, 7, 7),
    ),
    "conv2d depthwise": lambda: (Tail(nn.Conv2d(4, 8, 3, groups=4)), double(5, 4, 5, 5)),
    "conv2d same": lambda: (Tail(nn.Conv2d(2, 3, 4, padding="same")), double(5, 2, 5, 5)),
    "conv2d circular": lambda: (
        Tail(nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")),
        double(5, 2, 5, 5),
    ),
    "conv2d flattened": lambda: (Tail(nn.Conv2d(2, 3, 2), merged), double(5, 3, 2, 4, 4)),
    "conv2d uneven": lambda: (Tail(nn.Conv2d(1, 2, 3, stride=2)), double(5, 1, 6, 6)),
    "conv2d patches": lambda: (Tail(nn.Conv2d(2, 3, 2, 2, padding=1)), double(5, 2, 6, 5)),
    "conv2d flattened patches": lambda: (
        Tail(nn.Conv2d(2, 3, 2, 2), merged),
        double(5, 3, 2, 4, 4),
    ),
    "patches beside parameters (fallback)": lambda: (Tail(Patches()), double(5, 1, 4, 4)),
    "conv3d": lambda: (Tail(nn.Conv3d(2, 2, 2, stride=(1, 2, 1))), double(5, 2, 3, 4, 3)),
    "conv transposed (fallback)": lambda: (Tail(nn.ConvTranspose2d(2, 3, 2)), double(5, 2, 3, 3)),
    "embedding": lambda: (Tail(nn.Embedding(5, 3)), ids(6, 4)),
    "embedding padding": lambda: (Tail(nn.Embedding(5, 3, padding_idx=2)), ids(6, 4)),
    "embedding long": lambda: (Tail(nn.Embedding(5, 3)), ids(4, 70)),
    "embedding 1-d": lambda: (Tail(nn.Embedding(5, 3)), ids(6)),
    "embedding 3-d": lambda: (Tail(nn.Embedding(5, 3)), ids(6, 2, 3)),
    "embedding non-contiguous": lambda: (Tail(nn.Embedding(5, 3)), ids(4, 6).t()),
    "layer norm": lambda: (Tail(nn.LayerNorm(4)), double(6, 3, 4)),
    "layer norm 2-d": lambda: (Tail(nn.LayerNorm((3, 4))), double(6, 2, 3, 4)),
    "rms norm": lambda: (Tail(nn.RMSNorm(4)), double(6, 3, 4)),
    "group norm": lambda: (Tail(nn.GroupNorm(2, 4)), double(6, 4, 3, 3)),
    "group norm flat": lambda: (Tail(nn.GroupNorm(2, 4)), double(6, 4)),
    "instance norm": lambda: (Tail(nn.InstanceNorm2d(4, affine=True)), double(6, 4, 3, 3)),
    "lstm": lambda: (Tail(nn.LSTM(3, 4, batch_first=True)), double(5, 4, 3)),
    "lstm deep both ways": lambda: (
        Tail(nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)),
        double(5, 4, 3),
    ),
    "lstm time first": lambda: (Tail(nn.LSTM(3, 2), time_first), double(5, 5, 3)),
    "lstm projected": lambda: (Tail(nn.LSTM(3, 4, proj_size=2, batch_first=True)), double(5, 4, 3)),
    "lstm state": lambda: (Tail(nn.LSTM(3, 4, batch_first=True), with_state), double(5, 4, 3)),
    "lstm no bias": lambda: (Tail(nn.LSTM(3, 4, bias=False, batch_first=True)), double(5, 4, 3)),
    "gru": lambda: (Tail(nn.GRU(3, 4, batch_first=True)), double(5, 4, 3)),
    "gru deep both ways": lambda: (
        Tail(nn.GRU(3, 2, num_layers=2, bidirectional=True, batch_first=True)),
        double(5, 4, 3),
    ),
    "gru state": lambda: (Tail(nn.GRU(3, 4, batch_first=True), with_state), double(5, 4, 3)),
    "rnn": lambda: (Tail(nn.RNN(3, 4, batch_first=True)), double(5, 4, 3)),
    "rnn relu": lambda: (
        Tail(nn.RNN(3, 4, nonlinearity="relu", batch_first=True)),
        double(5, 4, 3),
    ),
    "lstm cell": lambda: (Tail(nn.LSTMCell(3, 4), cells), double(5, 3, 3)),
    "gru cell": lambda: (Tail(nn.GRUCell(3, 4), cells), double(5, 3, 3)),
    "rnn cell": lambda: (Tail(nn.RNNCell(3, 4), cells), double(5, 3, 3)),
    "attention": lambda: (
        Tail(nn.MultiheadAttention(4, 2, batch_first=True), self_attend),
        double(5, 3, 4),
    ),
    "attention time first": lambda: (
        Tail(nn.MultiheadAttention(4, 2), lambda m, x: time_first(lambda t: m(t, t, t), x)),
        double(5, 3, 4),
    ),
    "attention across": lambda: (
        Tail(nn.MultiheadAttention(4, 2, batch_first=True), cross_attend),
        double(5, 3, 4),
    ),
    "attention masked": lambda: (
        Tail(nn.MultiheadAttention(4, 2, batch_first=True), masked_attend),
        double(5, 3, 4),
    ),
    "attention widths": lambda: (
        Tail(
            nn.MultiheadAttention(4, 2, kdim=3, vdim=3, batch_first=True),
            lambda m, x: m(x, x[..., :3], x[..., 1:]),
        ),
        double(5, 3, 4),
    ),
    "attention zero (written out)": lambda: (
        Tail(nn.MultiheadAttention(4, 2, add_zero_attn=True, batch_first=True), self_attend),
        double(5, 3, 4),
    ),
    "transformer layer": lambda: (
        Tail(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)),
        double(5, 3, 4),
    ),
    "transformer layer time first": lambda: (
        Tail(nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), time_first),
        double(5, 3, 4),
    ),
    "prelu (fallback)": lambda: (Tail(nn.PReLU(3)), double(6, 3, 4)),
    "weight norm (fallback)": lambda: (
        Tail(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))),
        double(6, 2, 3),
    ),
    "bilinear (fallback)": lambda: (
        Tail(nn.Bilinear(3, 3, 2), lambda m, x: m(x, x.flip(1))),
        double(6, 3),
    ),
}


def build(name):
    torch.manual_seed(7)
    model, x = LAYERS[name]()
    model = model.double()
    width = model(x).shape[1]
    return nn.Sequential(model, nn.Linear(width, 3).double()), (x, torch.randint(3, (len(x),)))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_the_loop(name, engine):
    model, batch = build(name)
    before = copy.deepcopy(model.state_dict())
    truth, norms, clip = loop(model, nn.CrossEntropyLoss(), batch)
    eng = ENGINES[engine]()
    got = eng.clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=Flat(clip))
    assert_same(got, truth, norms, 1e-6)
    if "(written out)" in name and engine != "per_example":
        assert ["whole model" in note for note in eng.fallbacks] == [True]
    elif engine == "ghost":
        expected = 1 if "(fallback)" in name else 0
        assert len(eng.fallbacks) == expected, eng.fallbacks
        assert all("has no rule" in note for note in eng.fallbacks)
    else:
        assert not eng.fallbacks, eng.fallbacks
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or "forward" in m.__dict__ for m in model.modules())


def test_patches_are_a_linear_map_and_not_written_out():
    torch.manual_seed(0)
    model, x = nn.Sequential(Patches(), nn.Flatten(), nn.Linear(15, 3)), torch.randn(3, 1, 4, 4)
    model, x = model.double(), x.double()  # in single precision compiled loops may know them
    loss_fn, batch, engine = nn.CrossEntropyLoss(), (x, torch.tensor([0, 1, 2])), Ghost()
    forms, _ = engine.layers_for(model, loss_fn, batch).forms(model, loss_fn, batch)
    kinds = {name: type(own).__name__ for name, (own,) in forms.items()}
    assert (kinds["0.cut.weight"], kinds["0.places"]) == ("OuterGradient", "DenseGradient")
    note = "layer '0' (Patches) has no rule: its token, places written out per example"
    assert engine.fallbacks == [note]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["linear sequence", "conv2d", "embedding", "lstm", "attention"])
def test_single_precision_and_float64_norm_check(name, engine):
    model, (x, y) = build(name)
    model = model.float()
    x = x.float() if x.is_floating_point() else x
    truth, norms, _ = loop(model, F.cross_entropy, (x, y), 0.05)
    eng = ENGINES[engine]()
    got = eng.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.05))
    assert_same(got, truth, norms, 1e-5)
    for i in range(len(x)):  # what one example contributes, alone
        mask = torch.zeros(len(x))
        mask[i] = 1
        alone = eng.clipped_sum(model, F.cross_entropy, (x, y), clip=Flat(0.05), weights=mask)
        assert float(flat(alone.values).norm()) <= 0.05
        assert float(flat(alone.values).norm()) >= 0.05 * (1 - 1e-5)
        assert alone.units == 1


BLOCKS = {
    "linear": lambda: nn.Linear(4, 4),
    "norm": lambda: nn.LayerNorm(4),
    "rms": lambda: nn.RMSNorm(4),
    "tanh": nn.Tanh,
    "lstm": lambda: First(nn.LSTM(4, 4, batch_first=True)),
    "gru": lambda: First(nn.GRU(4, 4, batch_first=True)),
    "conv": lambda: Swapped(nn.Conv1d(4, 4, 3, padding=1)),
    "group": lambda: Swapped(nn.GroupNorm(2, 4)),
    "attention": lambda: First(nn.MultiheadAttention(4, 2, batch_first=True), self_attend),
    "prelu": lambda: Swapped(nn.PReLU(4)),
}


class First(nn.Module):
    def __init__(self, inner, call=None):
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, x):
        return (self.call(self.inner, x) if self.call else self.inner(x))[0]


class Swapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Net(nn.Module):
    def __init__(self, blocks, tie, reuse):
        super().__init__()
        self.tokens = nn.Embedding(6, 4)
        self.positions = nn.Embedding(3, 4)
        self.blocks = nn.ModuleList(BLOCKS[b]() for b in blocks)
        self.head = nn.Linear(4, 6, bias=not tie)
        self.reuse = reuse
        if tie:
            self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for _ in range(2 if self.reuse else 1):
            for block in self.blocks:
                h = h + block(h)
        return self.head(h)


def token_loss(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    blocks=st.lists(st.sampled_from(sorted(BLOCKS)), min_size=1, max_size=4),
    tie=st.booleans(),
    reuse=st.booleans(),
    size=st.integers(2, 5),
    seed=st.integers(0, 999),
    frozen=st.booleans(),
    layerwise=st.booleans(),
)
def test_random_networks(blocks, tie, reuse, size, seed, frozen, layerwise):
    torch.manual_seed(seed)
    model = Net(blocks, tie, reuse).double()
    if frozen:
        model.positions.weight.requires_grad_(False)
        for p in model.blocks[0].parameters():
            p.requires_grad_(False)
    batch = (torch.randint(6, (size, 3)), torch.randint(6, (size, 3)))
    truth, norms, clip = loop(model, token_loss, batch)
    ghost = Ghost()
    for engine in (PerExample(), ghost):
        got = engine.clipped_sum(model, token_loss, batch, clip=Flat(clip))
        assert_same(got, truth, norms, 1e-6)
    assert not any("whole" in note for note in ghost.fallbacks), ghost.fallbacks
    if layerwise:
        a, b = (
            e.clipped_sum(model, token_loss, batch, clip=PerLayer(clip))
            for e in (PerExample(), ghost)
        )
        torch.testing.assert_close(flat(a.values), flat(b.values), rtol=1e-8, atol=1e-10)
        assert a.bound == pytest.approx(clip)


@pytest.mark.parametrize("kind", ["convolutions", "rows"])
def test_the_default_type_of_torch_does_not_matter(kind):
    """The loops in C write float32, also where the default is another type."""
    torch.manual_seed(0)
    if kind == "rows":
        model, x = (
            nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 4)),
            torch.randn(32, 40),
        )
    else:
        first, second = nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Conv2d(16, 32, 4, stride=2)
        last = nn.Sequential(nn.Tanh(), nn.Flatten(), nn.Linear(32 * 5 * 5, 4))
        model, x = nn.Sequential(first, nn.Tanh(), second, last), torch.randn(32, 1, 28, 28)
    batch, clip = (x, torch.arange(32) % 4), Flat(0.1)
    truth = PerExample().clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=clip)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        found = Ghost().clipped_sum(model, nn.CrossEntropyLoss(), batch, clip=clip)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found.norms, truth.norms, rtol=1e-5, atol=0.0)
    for name, value in truth.values.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-4, atol=1e-6)
