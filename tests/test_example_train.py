"""The example that trains a network: it learns, its heads do what it says, and closed ones go."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from _support import run_python

PATH = Path(__file__).parents[1] / "examples" / "train_small_network.py"


def load_example():
    spec = importlib.util.spec_from_file_location(PATH.stem, PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load_example()

# In a process of its own, since thousands of small products on several threads of a busy machine
# take minutes, and NumPy cannot be told in this one to use a single thread.
_TRAIN = f"""
import importlib.util
import numpy as np

spec = importlib.util.spec_from_file_location("example", {str(PATH)!r})
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
rng = np.random.default_rng(1)
network = example.Network(rng)
losses = example.train(network, rng, 350, report=lambda line: None)
trained = {{f"trained {{name}}": x.copy() for name, x in network.parameters().items()}}
rng = np.random.default_rng(1)
gates = example.train_gates(network, rng, 450, report=lambda line: None)
gated = {{f"gated {{name}}": x for name, x in network.parameters().items()}}
np.savez("result.npz", losses=losses, gates=gates.deterministic(), **trained, **gated)
"""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """What a short training came to, by name."""
    folder = tmp_path_factory.mktemp("train")
    done = run_python(_TRAIN, folder, **_ONE_THREAD)
    assert done.returncode == 0, done.stderr
    return dict(np.load(folder / "result.npz"))


def network_of(result, stage):
    network = example.Network(np.random.default_rng(0))
    for name, parameter in network.parameters().items():
        parameter[...] = result[f"{stage} {name}"]
    return network


@pytest.fixture(scope="module")
def gated(result):
    """The network at the end, and its gates."""
    return network_of(result, "gated"), result["gates"]


def test_texts_repeat_and_what_is_known_follows_from_what_came():
    letters, known = example.draw_texts(np.random.default_rng(0), 50, period=6)

    assert (letters[:, 6:] == letters[:, :-6]).all()
    assert all(len(set(text[:6])) == 6 for text in letters.tolist())
    np.testing.assert_array_equal(known, [np.arange(example.N_PLACE) > 6] * 50)


def test_loss_falls(result):
    losses = result["losses"]
    assert np.mean(losses[:10]) > 2.0
    assert np.mean(losses[-10:]) < 0.3
    loss, guessed = example.guess_rate(network_of(result, "trained"), np.random.default_rng(4))
    assert loss < 0.3
    assert guessed > 0.9


def test_gradient_of_the_network_is_that_of_its_loss():
    rng = np.random.default_rng(3)
    network = example.Network(rng)
    letters, known = example.draw_texts(rng, 8)
    gates = rng.random((example.N_LAYER, example.N_HEAD)) + 0.5
    parameters = network.parameters() | {"gates": gates}

    def loss():
        return example.loss_and_gradient(network.forward(letters, gates)[0], letters, known)[0]

    logits, activations = network.forward(letters, gates)
    _, grad, _ = example.loss_and_gradient(logits, letters, known)
    grads = network.backward(grad, activations, with_gates=True)

    assert grads.keys() == parameters.keys()
    for name, parameter in parameters.items():
        # Down the gradient itself, the loss falls by the step times its squared length.
        length = np.linalg.norm(grads[name])
        assert length > 1e-3, name
        before, step = parameter.copy(), 1e-2 * grads[name] / length
        parameter += step
        above = loss()
        parameter[...] = before - step
        below = loss()
        parameter[...] = before
        assert (above - below) / 2e-2 == pytest.approx(length, rel=2e-2), name


def test_it_carries_on_a_text_it_has_never_seen(gated):
    network, gates = gated
    letters, _ = example.draw_texts(np.random.default_rng(7), 40, period=9)
    written = letters[:, :12].copy()  # a round, and a little more

    while written.shape[1] < example.N_PLACE:
        padding = np.zeros((40, example.N_PLACE - written.shape[1]), int)
        logits, _ = network.forward(np.concatenate([written, padding], axis=1), gates)
        following = logits[:, written.shape[1] - 1].argmax(axis=-1)
        written = np.concatenate([written, following[:, None]], axis=1)

    assert (written == letters)[:, 12:].mean() > 0.95


def test_heads_learn_to_look_back_and_to_search(gated):
    before, after = (
        [
            x.offset_mass.mean(axis=0)
            for x in example.look_at_heads(network, np.random.default_rng(5))
        ]
        for network in (example.Network(np.random.default_rng(0)), gated[0])
    )
    is_open = gated[1] > 0
    # In layer 0 at the letter before, in layer 1 behind the last appearance of the present one.
    for layer, offset in ((0, 0), (1, 2)):
        assert before[layer][:, offset].max() < 0.15
        assert after[layer][is_open[layer], offset].max() > 0.5


def test_gates_close_and_the_answers_stay_right(gated):
    network, gates = gated
    assert 2 <= np.count_nonzero(gates) <= 6
    assert gates.any(axis=1).all()
    assert example.guess_rate(network, np.random.default_rng(8), gates=gates)[1] > 0.95


def test_closed_heads_can_be_cut_out(gated):
    network, gates = gated
    smaller = network.pruned(gates)
    letters, _ = example.draw_texts(np.random.default_rng(9), 20)

    with_gates, _ = network.forward(letters, gates)
    without, _ = smaller.forward(letters)

    np.testing.assert_allclose(without, with_gates, rtol=0, atol=1e-4 * np.abs(with_gates).max())
    share = np.count_nonzero(gates) / gates.size
    assert example.multiply_adds(smaller) == share * example.multiply_adds(network)


def test_it_runs_from_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(PATH), "--steps", "1", "--gate-steps", "1"])
    example.main()
    shown = capsys.readouterr().out
    assert shown.count("step    1   loss") == 2
    assert "8 heads   loss" in shown
