"""Teach a network of two layers of attention to carry on a pattern, and look at its heads.

Needs nothing but NumPy and this package, and takes ten seconds. (Its products are too small to share
out; on a busy machine, one thread is many times as fast as two.) ::

    OPENBLAS_NUM_THREADS=1 python examples/train_small_network.py

The texts are a few different letters in an order that is drawn anew each time, said again and
again: ``C F A D C F A D C F ...``. From the second round on every letter is known, if one finds
where the present one stood before and looks at what came next. No single layer can do that, since
it has to be said to a letter what stands before it before anyone can search for it. Two layers
learn it: a head in the first copies to each letter the one before, and a head in the second
searches for the present one (an induction head, Olsson et al. 2022).

The network is trained by the gradients of ``mha_fast.MultiHeadAttention`` and Adam. Then its heads
get gates of Voita et al. 2019 that are learned too, under a penalty for each that is open; those
that closed are cut out, and what is left of the cost is counted.
"""

import argparse

import numpy as np

from mha_fast import cost, head_statistics
from mha_fast.heads import HardConcrete
from mha_fast.layer import MultiHeadAttention

N_LETTER = 16
N_PLACE = 32  # length of a text
SHORTEST, LONGEST = 4, 12  # letters of a round
N_TEXT = 32  # of a step of training
EMBED_DIM, N_LAYER, N_HEAD = 32, 2, 4


# ---------------------------------------------------------------- the task


def draw_texts(rng, n_text, period=None):
    """Letters (n_text, N_PLACE), and which of them can be known from those before.

    Within a round no letter comes twice. Every text has its own number of letters in a round,
    unless `period` says how many.
    """
    if period is None:
        period = rng.integers(SHORTEST, LONGEST + 1, n_text)
    period = np.broadcast_to(period, n_text)[:, None]
    orders = rng.permuted(np.tile(np.arange(N_LETTER), (n_text, 1)), axis=1)
    place = np.arange(N_PLACE)
    letters = np.take_along_axis(orders, place % period, axis=1)
    # The first letter of the second round is the first that is no news, once this one is seen:
    # that a round is over shows only when a letter comes again.
    return letters, place > period


def loss_and_gradient(logits, letters, known):
    """Mean cross entropy over the letters that can be known, its gradient, and the share guessed.

    The logits at one place are for the letter at the next.
    """
    logits, letters, known = logits[:, :-1], letters[:, 1:], known[:, 1:]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    log_share = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    is_right = np.arange(N_LETTER) == letters[..., None]
    weight = known / known.sum()
    loss = -(log_share[is_right].reshape(letters.shape) * weight).sum()
    gradient = np.zeros((len(letters), N_PLACE, N_LETTER), logits.dtype)
    gradient[:, :-1] = (np.exp(log_share) - is_right) * weight[..., None]
    guessed = (logits.argmax(axis=-1) == letters)[known].mean()
    return float(loss), gradient, float(guessed)


# ---------------------------------------------------------------- the network


def rotary(heads, positions, base=100.0):
    """Turn pairs of features with the position, so that scores see distances (Su et al. 2021)."""
    half = heads.shape[-1] // 2
    angle = positions[..., None] * base ** -(np.arange(half) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    first, second = heads[..., :half], heads[..., half:]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return np.concatenate(turned, axis=-1).astype(heads.dtype)


class Network:
    """Letters in, logits of the next letter out; each layer adds to what came in."""

    def __init__(self, rng):
        self.embedding = rng.standard_normal((N_LETTER, EMBED_DIM), dtype=np.float32)
        self.readout = rng.normal(0, EMBED_DIM**-0.5, (EMBED_DIM, N_LETTER)).astype(np.float32)
        self.layers = [
            MultiHeadAttention(EMBED_DIM, N_HEAD, bias=False, position=rotary, seed=rng)
            for _ in range(N_LAYER)
        ]

    def parameters(self):
        """All that is learned, by name, as arrays that can be written to."""
        named = {"embedding": self.embedding, "readout": self.readout}
        for i, layer in enumerate(self.layers):
            named |= {f"layer {i} {name}": x for name, x in layer.parameters().items()}
        return named

    def forward(self, letters, gates=None):
        """Logits (n_text, N_PLACE, N_LETTER), and what `backward` needs."""
        stream, kept = self.embedding[letters], []
        for i, layer in enumerate(self.layers):
            gate = None if gates is None else gates[i]
            added, saved = layer.forward_saving(stream, is_causal=True, head_mask=gate)
            stream = stream + added
            kept.append(saved)
        return stream @ self.readout, (letters, stream, kept)

    def backward(self, grad_logits, activations, with_gates=False):
        """Gradients by the names of `parameters`, and "gates" (N_LAYER, N_HEAD) if asked for."""
        letters, stream, kept = activations
        n_row = letters.size
        rows = grad_logits.reshape(n_row, N_LETTER)
        grads = {"readout": stream.reshape(n_row, EMBED_DIM).T @ rows}
        grad, grad_gates = grad_logits @ self.readout.T, []
        for i, layer in reversed(list(enumerate(self.layers))):
            names = [*layer.parameters(), "query", *(["head_mask"] if with_gates else [])]
            found = layer.backward(grad, kept[i], wanted=names)
            grad = grad + found.pop("query")  # beside the layer, and through it
            if with_gates:
                grad_gates.insert(0, found.pop("head_mask"))
            grads |= {f"layer {i} {name}": x for name, x in found.items()}
        grads["embedding"] = np.zeros_like(self.embedding)
        np.add.at(grads["embedding"], letters, grad)
        return grads | ({"gates": np.array(grad_gates)} if with_gates else {})

    def pruned(self, gates):
        """A network without the heads whose gate is 0; other gates go into W_O."""
        smaller = Network(np.random.default_rng(0))
        smaller.embedding, smaller.readout = self.embedding.copy(), self.readout.copy()
        smaller.layers = []
        for layer, gate in zip(self.layers, gates, strict=True):
            kept = layer.prune_heads(gate == 0)
            kept.W_O[...] *= gate[gate != 0][:, None, None]
            smaller.layers.append(kept)
        return smaller


class Adam:
    """Steps of Kingma and Ba 2015, algorithm 1, written into the parameters."""

    def __init__(self, parameters, rate, decay=(0.9, 0.98), tiny=1e-8):
        self.parameters, self.rate, self.decay, self.tiny = parameters, rate, decay, tiny
        self.means = {name: (np.zeros_like(x), np.zeros_like(x)) for name, x in parameters.items()}
        self.n_step = 0

    def step(self, grads):
        """Take one step down the gradients."""
        self.n_step += 1
        for name, parameter in self.parameters.items():
            for mean, new, decay in zip(
                self.means[name], (grads[name], grads[name] ** 2), self.decay, strict=True
            ):
                mean += (1 - decay) * (new - mean)
            first, second = (
                mean / (1 - decay**self.n_step)
                for mean, decay in zip(self.means[name], self.decay, strict=True)
            )
            parameter -= self.rate * first / (np.sqrt(second) + self.tiny)


# ---------------------------------------------------------------- training


def train(network, rng, n_step, rate=5e-3, report=print, every=50):
    """Train all parameters; return the loss of each step."""
    adam, losses = Adam(network.parameters(), rate), []
    for step in range(1, n_step + 1):
        letters, known = draw_texts(rng, N_TEXT)
        logits, activations = network.forward(letters)
        loss, grad, guessed = loss_and_gradient(logits, letters, known)
        adam.step(network.backward(grad, activations))
        losses.append(loss)
        if step == 1 or step % every == 0:
            report(f"step {step:4}   loss {loss:6.3f}   {guessed:4.0%} guessed")
    return losses


def train_gates(network, rng, n_step, penalty=0.3, rate=5e-3, report=print):
    """Go on training, with a gate on each head; return the gates, `HardConcrete`.

    The loss has ``penalty`` times the expected number of open heads added (Voita et al. 2019,
    section 6.1).
    """
    log_alpha = np.full((N_LAYER, N_HEAD), 2.0)
    adam, gate_adam = Adam(network.parameters(), rate), Adam({"gates": log_alpha}, 0.05)
    for step in range(1, n_step + 1):
        letters, known = draw_texts(rng, N_TEXT)
        gates = HardConcrete(log_alpha)
        gate, slope = gates.sample_with_slope(rng)
        logits, activations = network.forward(letters, gate)
        loss, grad, guessed = loss_and_gradient(logits, letters, known)
        grads = network.backward(grad, activations, with_gates=True)
        adam.step(grads)
        gate_adam.step({"gates": grads["gates"] * slope + penalty * gates.expected_l0_slope})
        if step == 1 or step % 50 == 0:
            report(
                f"step {step:4}   loss {loss:6.3f}   {guessed:4.0%} guessed   "
                f"{gates.expected_l0:.1f} heads open"
            )
    return HardConcrete(log_alpha)


# ---------------------------------------------------------------- what came of it


def guess_rate(network, rng, n_text=256, gates=None):
    """Loss and share of letters guessed, over new texts."""
    letters, known = draw_texts(rng, n_text)
    loss, _, guessed = loss_and_gradient(network.forward(letters, gates)[0], letters, known)
    return loss, guessed


def look_at_heads(network, rng, period=10):
    """Statistics of each layer's heads, over texts whose rounds have `period` letters.

    The offsets looked at: the letter before, the letter itself, and the one behind the present
    letter's last appearance, which is the one to come.
    """
    letters, _ = draw_texts(rng, 32, period)
    _, (_, _, kept) = network.forward(letters)
    return [
        head_statistics(
            saved.query[..., period:, :],
            saved.key,
            is_causal=True,
            query_offset=period,
            offsets=(-1, 0, 1 - period),
        )
        for saved in kept
    ]


def print_heads(statistics):
    """One line per head."""
    print("layer head   entropy   weight on: letter before   itself   behind its last appearance")
    for i, layer in enumerate(statistics):
        entropy, mass = layer.entropy.mean(axis=0), layer.offset_mass.mean(axis=0)
        for head, (nats, (before, itself, behind)) in enumerate(zip(entropy, mass, strict=True)):
            print(f"{i:5} {head:4} {nats:9.2f} {before:26.2f} {itself:8.2f} {behind:28.2f}")


def multiply_adds(network):
    """Of the layers, counted for one text."""
    return sum(
        cost.layer_cost(
            EMBED_DIM, layer.num_heads, n_query=N_PLACE, head_width=layer.head_width, bias=False
        ).multiply_adds
        for layer in network.layers
    )


def show(network, name, seed, gates=None):
    """Print how well a network does on new texts, and what it costs."""
    loss, guessed = guess_rate(network, np.random.default_rng([seed, 1]), gates=gates)
    n_head = sum(layer.num_heads for layer in network.layers)
    print(
        f"{name:14} {n_head} heads   loss {loss:.3f}   {guessed:.1%} of new texts guessed   "
        f"{multiply_adds(network):,} multiply-adds per text"
    )


def main():
    """Train, look, close gates, cut."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="of training (default %(default)s)")
    parser.add_argument("--gate-steps", type=int, default=500, help="with gates (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    network = Network(rng)

    print("The heads before training:")
    print_heads(look_at_heads(network, rng))
    print(f"\nTraining. Who knows nothing has a loss of {np.log(N_LETTER):.3f}:")
    train(network, rng, options.steps)
    print("\nThe heads after it:")
    print_heads(look_at_heads(network, rng))

    print("\nTraining on, with a gate on each head:")
    gates = train_gates(network, rng, options.gate_steps)
    print()
    print(gates)
    smaller = network.pruned(gates.deterministic())
    print("\nThe heads that are left:")
    print_heads(look_at_heads(smaller, rng))
    print()
    show(network, "with gates", options.seed, gates.deterministic())
    show(smaller, "without", options.seed)


if __name__ == "__main__":
    main()
