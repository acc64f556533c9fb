"""A short run of the fuzzer (fuzz_attention.py), and proof that it sees what goes wrong."""

import pytest
from _fuzz_cases import backward_entries, draw_case, entries
from fuzz_attention import main

import mha_fast
from mha_fast import _attention

N_CASE = 300
N_BACKWARD = 60


def test_random_calls(isa, capsys):
    status = main(["--cases", str(N_CASE), "--isa", isa])
    assert status == 0, capsys.readouterr().out


@pytest.mark.parametrize("entry", backward_entries())
def test_random_backward_passes(entry, isa, capsys):
    status = main(["--cases", str(N_BACKWARD), "--entry", entry, "--isa", isa])
    assert status == 0, capsys.readouterr().out


def test_every_entry_point_is_drawn():
    drawn = {draw_case(0, number, ["any"]).entry for number in range(N_CASE)}
    assert drawn == set(entries())
    assert drawn >= {"attention", "attention_varlen", "attention_weights"}


def test_a_case_follows_from_its_number():
    first, again = (draw_case(3, 14, ["any"]) for _ in range(2))
    assert first.describe() == again.describe()
    for name, x in first.arrays.items():
        assert x.tobytes() == again.arrays[name].tobytes()


def _one_key_too_many(call):
    call.window = (call.window[0], call.window[1] + 1)


def _no_offset(call):
    call.query_offset = None


def _wrong_scale(call):
    call.scale *= 1 + 1e-3


def _no_gates(call):
    call.head_mask = None


def _no_sinks(call):
    call.sinks = None


def _all_keys(call):
    call.kv_lengths = None


def _no_mask(call):
    call.mask_type, call.mask = 0, None


@pytest.mark.parametrize(
    "fault",
    [_one_key_too_many, _no_offset, _wrong_scale, _no_gates, _no_sinks, _all_keys, _no_mask],
    ids=lambda fault: fault.__name__.strip("_"),
)
def test_fault_in_the_call_is_found(fault, monkeypatch, capsys):
    right = _attention._run

    def faulty(call, *results):
        fault(call)
        right(call, *results)

    monkeypatch.setattr(_attention, "_run", faulty)
    assert main(["--cases", "200", "--entry", "attention", "--max-findings", "1"]) == 1
    assert "FINDING: seed 0, case " in capsys.readouterr().out


def test_bits_that_depend_on_the_threads_are_found(monkeypatch, capsys):
    right = _attention._run

    def faulty(call, out, lse):
        right(call, out, lse)
        if call.n_thread == 1:
            out *= 1 + 2**-7

    monkeypatch.setattr(_attention, "_run", faulty)
    assert main(["--cases", "100", "--entry", "attention", "--max-findings", "1"]) == 1
    assert "FINDING" in capsys.readouterr().out


def test_written_input_is_found(monkeypatch, capsys):
    right = mha_fast.attention

    def faulty(query, **options):
        if query.flags.writeable:
            query *= 2
        return right(query, **options)

    monkeypatch.setattr(mha_fast, "attention", faulty)
    assert main(["--cases", "100", "--entry", "attention", "--max-findings", "1"]) == 1
    assert "query was written" in capsys.readouterr().out
