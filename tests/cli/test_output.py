"""Tables on stdout: which columns are of numbers and set to the right."""

from __future__ import annotations

import pytest

from tracekit.cli.output import table

LONG = "123456789012"


@pytest.mark.parametrize(
    "cell", ["-", "0", "12", "+0.25", "-3.3e-15", "1e-09", "1e+03", "1,024", "12 %", "12.5%"]
)
def test_numbers_are_set_to_the_right(cell: str) -> None:
    short, long, _ = table("", ["value"], [[cell], [LONG], [""]]).splitlines()[-3:]
    assert short == long.replace(LONG, cell.rjust(len(LONG)))


@pytest.mark.parametrize("cell", ["e-9", "1-2", "0.1 [0, 1]", "v1.2", "1e", "--1"])
def test_other_texts_are_set_to_the_left(cell: str) -> None:
    short, long = table("", ["value"], [[cell], [LONG]]).splitlines()[-2:]
    assert short == long.replace(LONG, cell)
