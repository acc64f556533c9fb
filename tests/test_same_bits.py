"""The command that compares the bits of two builds."""

import sys

import same_bits

from mha_fast import _core

COMMAND = [sys.executable, sys.executable, "--cases", "6", "--isa", _core.available_isas()[0]]


def test_a_build_gives_the_same_bits_as_itself(capsys):
    assert same_bits.main(COMMAND) == 0
    assert "6 cases, 0 differ, 0 in bits of NaN alone" in capsys.readouterr().out


def test_other_bits_are_found_and_described(monkeypatch, capsys):
    lines_of, n_before = same_bits._lines_of, []

    def other_numbers_the_second_time(python, **how):
        if how["what"] == "digests":
            how["seed"] += len(n_before)
            n_before.append(how)
        return lines_of(python, **how)

    monkeypatch.setattr(same_bits, "_lines_of", other_numbers_the_second_time)
    assert same_bits.main(COMMAND) == 1
    assert "  case 0: " in capsys.readouterr().out


def test_an_instruction_set_that_one_lacks_is_no_success():
    assert same_bits.main([*COMMAND, "--isa", "unheard of"]) == 1
