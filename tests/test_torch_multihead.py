"""torch.nn.MultiheadAttention taken over: every kind of layer and call against torch's own."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra mha_fast[torch]")

import mha_fast.torch
from mha_fast.integrations.torch import _multihead

LAYERS = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 10, "vdim": 6, "batch_first": True},
    "bias of keys": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True},
}


def pair(**options):
    torch.manual_seed(0)
    theirs = torch.nn.MultiheadAttention(24, 4, **options).eval()
    return theirs, mha_fast.torch.MultiheadAttention.from_module(theirs)


def inputs(layer, batch=3, n_query=9, n_key=11):
    """Query, key and value; a batch of None is none."""
    torch.manual_seed(1)
    result = []
    for n, width in ((n_query, 24), (n_key, layer.kdim), (n_key, layer.vdim)):
        x = torch.randn(n, width) if batch is None else torch.randn(batch, n, width)
        result.append(x if batch is None or layer.batch_first else x.transpose(0, 1))
    return result


@pytest.fixture
def calls(monkeypatch):
    made = []

    def counted(*args):
        made.append(args)
        return function(*args)

    function = _multihead.scaled_dot_product_attention
    monkeypatch.setattr(_multihead, "scaled_dot_product_attention", counted)
    return made


@pytest.mark.parametrize("batch", [3, None])
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_is_that_of_torch(options, batch, calls):
    theirs, ours = pair(**options)
    x = inputs(theirs, batch)
    right, _ = theirs(*x, need_weights=False)
    out, weights = ours(*x, need_weights=False)
    assert weights is None
    assert len(calls) == (0 if {"add_bias_kv", "add_zero_attn"} & set(options) else 1)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-6)


def bool_masks():
    padding = torch.zeros(3, 11, dtype=torch.bool)
    padding[0, 7:] = padding[2, 3:] = True
    hidden = torch.ones(9, 11, dtype=torch.bool).triu(1)
    return padding, hidden


MASKS = {
    "padding": (True, None),
    "triangle": (None, "bool"),
    "both": (True, "bool"),
    "float": (None, "float"),
    "padding and float": (True, "float"),
    "per head": (True, "per head"),
    "float padding": ("float", "float"),
}


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.filterwarnings("ignore:Support for mismatched")
def test_masks_are_those_of_torch(masks, calls):
    theirs, ours = pair(batch_first=True)
    padding, hidden = bool_masks()
    if masks[0] == "float":
        padding = torch.zeros(3, 11).masked_fill(padding, -torch.inf)
    elif masks[0] is None:
        padding = None
    torch.manual_seed(2)
    attn_mask = {
        None: None,
        "bool": hidden,
        "float": torch.randn(9, 11),
        "per head": hidden.expand(12, 9, 11) & (torch.rand(12, 9, 11) > 0.3),
    }[masks[1]]
    x = inputs(theirs)
    options = {"key_padding_mask": padding, "attn_mask": attn_mask, "need_weights": False}
    right, _ = theirs(*x, **options)
    out, _ = ours(*x, **options)
    assert len(calls) == 1
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-6)


def test_weights_are_torchs(calls):
    theirs, ours = pair()
    x = inputs(theirs)
    torch.testing.assert_close(ours(*x), theirs(*x), rtol=0, atol=0)
    assert not calls


def test_parameters_are_shared():
    theirs, ours = pair()
    assert isinstance(ours, torch.nn.MultiheadAttention)
    assert [id(p) for p in ours.parameters()] == [id(p) for p in theirs.parameters()]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    assert ours.training == theirs.training
    ours.register_parameter("another", None)
    assert "another" not in theirs._parameters


def test_trains_like_torch():
    theirs, ours = pair(batch_first=True)
    theirs.train(), ours.train()
    x = inputs(theirs)
    gradients = []
    for layer in (theirs, ours):
        layer.zero_grad()
        layer(*x, need_weights=False)[0].square().sum().backward()
        gradients.append([p.grad.clone() for p in layer.parameters()])
    for right, ours_grad in zip(*gradients, strict=True):
        torch.testing.assert_close(ours_grad, right, rtol=1e-4, atol=1e-5)


def test_dropout_only_in_training():
    _, ours = pair(dropout=0.5, batch_first=True)
    x = inputs(ours)
    right = ours(*x, need_weights=False)[0]
    assert torch.equal(ours(*x, need_weights=False)[0], right)
    ours.train()
    assert not torch.equal(ours(*x, need_weights=False)[0], right)


def test_another_module_is_named():
    with pytest.raises(TypeError, match="module is of type Linear; expected torch.nn.Multi"):
        mha_fast.torch.MultiheadAttention.from_module(torch.nn.Linear(2, 2))
