"""Units: exact integers inside, human text at the edges, GB and GiB never mixed."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.device import units
from trnsim.device.errors import BadInput

PARSERS = {
    "size": (units.parse_bytes, "B"),
    "time": (units.parse_time, "ps"),
    "bandwidth": (units.parse_rate, "B/s"),
    "clock": (units.parse_clock, "Hz"),
}


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bytes, "64MiB", 64 * 2**20),
        (units.parse_bytes, "96 GiB", 96 * 2**30),
        (units.parse_bytes, "96GB", 96 * 10**9),
        (units.parse_time, "15us", 15_000_000),
        (units.parse_time, "0.85us", 850_000),
        (units.parse_rate, "256GB/s", 256 * 10**9),
        (units.parse_rate, "820GiB/s", 820 * 2**30),
        (units.parse_rate, "200Gbps", 25 * 10**9),
        (units.parse_clock, "0.96GHz", 960_000_000),
    ],
)
def test_text_is_parsed_exactly(parse, text: str, value: int) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("1.5min", 90), ("2 h", 7200), ("3days", 259200)]
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


def test_durations_for_people() -> None:
    assert [units.format_duration(s) for s in (0.5, 90, 7200, 864000)] == [
        "0.5 s", "1.5 min", "2 h", "10 days",
    ]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@given(number=st.integers(0, 10**18))
def test_base_unit_round_trips(name: str, number: int) -> None:
    parse, unit = PARSERS[name]
    assert parse(f"{number}{unit}") == number


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize("text", ["", "64", "MiB", "64 mib", "-1us", "1e", "1us 2us", "nan us"])
def test_bare_or_foreign_text_is_refused(name: str, text: str) -> None:
    parse, unit = PARSERS[name]
    with pytest.raises(BadInput, match=f"^{name}: .* allowed: a number with a unit of {unit}"):
        parse(text)


@pytest.mark.parametrize(
    ("parse", "text"),
    [(units.parse_bytes, "1us"), (units.parse_time, "1GHz"), (units.parse_rate, "1GB")],
)
def test_a_unit_of_another_kind_is_refused(parse, text: str) -> None:
    with pytest.raises(BadInput):
        parse(text)


def test_the_field_is_named() -> None:
    with pytest.raises(BadInput, match="^chunk: 64 is not valid"):
        units.parse_bytes("64", field="chunk")


def test_gb_and_gib_differ_in_time() -> None:
    """Case U1: 14 hops of 128 KiB and 500 ns at 50 GB/s are 43,700.16 ns; at 50 GiB/s less."""
    hop = Fraction(131072 * 10**12, units.parse_rate("50GB/s")) + units.parse_time("500ns")
    assert 14 * hop == Fraction("43700.16") * 1000
    assert units.transfer_ps(131072, units.parse_rate("50GiB/s")) * 14 + 7_000_000 == 41_179_698


@given(nbytes=st.integers(0, 2**50), rate=st.integers(1, 2**50))
def test_transfer_rounds_up_and_never_more_than_one(nbytes: int, rate: int) -> None:
    exact = Fraction(nbytes * units.PS_PER_S, rate)
    assert exact <= units.transfer_ps(nbytes, rate) < exact + 1


@given(cycles=st.integers(0, 2**40), hertz=st.integers(1, 10**10))
def test_cycles_round_up_and_never_more_than_one(cycles: int, hertz: int) -> None:
    exact = Fraction(cycles * units.PS_PER_S, hertz)
    assert exact <= units.cycles_ps(cycles, hertz) < exact + 1


@given(a=st.integers(0, 2**50), b=st.integers(0, 2**50), rate=st.integers(1, 2**40))
def test_splitting_a_transfer_costs_at_most_a_picosecond(a: int, b: int, rate: int) -> None:
    whole = units.transfer_ps(a + b, rate)
    assert whole <= units.transfer_ps(a, rate) + units.transfer_ps(b, rate) <= whole + 1


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (units.format_time(12_345_678), "12.35 us"),
        (units.format_time(0), "0 ps"),
        (units.format_bytes(24 * 2**30), "24 GiB"),
        (units.format_rate(256 * 10**9), "256 GB/s"),
        (units.format_rate(2_900 * 10**9), "2.9 TB/s"),
    ],
)
def test_people_read_a_scaled_unit(text: str, shown: str) -> None:
    assert text == shown


@given(nbytes=st.integers(1, 2**45))
def test_printed_sizes_parse_back_within_their_four_digits(nbytes: int) -> None:
    back = units.parse_bytes(units.format_bytes(nbytes))
    assert abs(back - nbytes) <= nbytes * 6e-4 + 1


@given(ps=st.integers(1, 10**17))
def test_printed_times_parse_back_within_their_four_digits(ps: int) -> None:
    back = units.parse_time(units.format_time(ps))
    assert abs(back - ps) <= ps * 6e-4 + 1
