"""Chips: what the spec files say, where it comes from, and files that are refused."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trnsim.device.chip import (
    ENGINES,
    SPEC_FILES,
    Chip,
    chip_of,
    load_chip,
    read_spec,
    with_number,
)
from trnsim.device.errors import BadFile, BadInput
from trnsim.device.numbers import NEED_NOTE, STATUSES, read_entries, read_number

CHIPS = [load_chip(name) for name in SPEC_FILES]
TRN2 = load_chip("trn2")
each_chip = pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
GOOD = {"value": "1us", "unit": "time", "source": "page.rst", "status": "published"}


@pytest.mark.parametrize(("short", "long"), SPEC_FILES.items())
def test_short_and_long_names_are_the_same_chip(short: str, long: str) -> None:
    assert load_chip(short) is load_chip(long) is load_chip(long.capitalize())


def test_unknown_chip_names_the_choices() -> None:
    with pytest.raises(BadInput, match="^chip: trn4 is not valid; allowed: one of inf2, trn1, .*"):
        load_chip("trn4")


@each_chip
def test_every_number_has_a_source_and_an_honest_status(chip: Chip) -> None:
    for key, number in chip.numbers.items():
        assert number.source and number.unit, key
        assert number.status in STATUSES, key
        assert number.note or number.status not in NEED_NOTE, key


@each_chip
def test_every_field_is_a_number_of_the_file(chip: Chip) -> None:
    plain = {"name", "title", "generation", "numbers"}
    named = {key.partition(".")[0] for key in chip.numbers}
    assert named == {item.name for item in dataclasses.fields(chip)} - plain


@each_chip
def test_published_sizes_multiply_out(chip: Chip) -> None:
    sbuf = {2: 24, 3: 28, 4: 32}[chip.generation] * 2**20
    assert chip.partitions * chip.sbuf_physical_partition_bytes == sbuf
    assert chip.partitions * chip.psum_banks * chip.psum_bank_bytes == 2 * 2**20
    reserved = chip.sbuf_physical_partition_bytes - chip.sbuf_partition_bytes
    assert reserved == 16 * 1024 + (8 if chip.generation > 2 else 0)
    assert chip.dma_bytes_per_s == chip.dma_engines * chip.dma_engine_bytes_per_s
    assert chip.cores_per_stack * chip.hbm_stacks == chip.cores


@each_chip
def test_matmul_peak_is_the_array_times_its_clock(chip: Chip) -> None:
    """128 x 128 multiply-adds per cycle; the pages round to whole TFLOP/s."""
    exact = 2 * 128 * 128 * chip.clock_hz["tensor"]
    assert chip.peak("bf16") == pytest.approx(exact, rel=0.01)
    assert chip.peak("f32") == pytest.approx(exact / chip.matmul_fp32_factor, rel=0.02)
    assert chip.peak("f8E4M3FN") == pytest.approx(exact / chip.matmul_fp8_factor, rel=0.01)


@each_chip
def test_engines_and_lnc(chip: Chip) -> None:
    assert tuple(chip.clock_hz) == ENGINES
    assert chip.lnc_default in chip.lnc_allowed
    assert chip.lnc_allowed == ((1,) if chip.generation == 2 else (1, 2))


def test_chips_differ_where_they_should() -> None:
    facts = [(c.name, c.cores, c.hbm_bytes >> 30, c.dma_bytes_per_s // 10**9) for c in CHIPS]
    assert facts == [
        ("inf2", 2, 32, 272),
        ("trn1", 2, 32, 272),
        ("trn2", 8, 96, 368),
        ("trn3", 8, 144, 528),
    ]
    assert [set(c.link_bytes_per_s) for c in CHIPS] == [
        {"ring"},
        {"torus"},
        {"torus", "z"},
        {"server", "rack", "direct"},
    ]


@each_chip
@given(nbytes=st.integers(0, 1 << 20))
def test_descriptor_efficiency_rises_to_one(chip: Chip, nbytes: int) -> None:
    here, more = chip.descriptor_efficiency(nbytes), chip.descriptor_efficiency(nbytes + 1)
    assert 0 <= here <= more <= 1


@each_chip
def test_descriptor_efficiency_passes_through_the_measured_points(chip: Chip) -> None:
    for nbytes, fraction in chip.dma_efficiency:
        assert chip.descriptor_efficiency(nbytes) == fraction


def test_a_chip_is_a_value() -> None:
    copy = pickle.loads(pickle.dumps(TRN2))
    assert copy == TRN2 and hash(copy) == hash(TRN2)
    faster = dataclasses.replace(TRN2, hbm_bytes_per_s=10**13)
    assert faster != TRN2 and faster.hbm_bytes_per_s == 10**13
    assert repr(TRN2) == "Chip('trn2')"


def test_a_number_is_replaced_with_its_source() -> None:
    number = read_number(GOOD | {"value": "2GHz", "unit": "clock"}, "here")
    changed = with_number(TRN2, "clock_hz.tensor", number)
    assert changed.clock_hz == {**TRN2.clock_hz, "tensor": 2 * 10**9}
    assert changed.number("clock_hz.tensor") is number
    assert TRN2.clock_hz["tensor"] == 2_400_000_000


def test_number_gives_source_and_refuses_other_keys() -> None:
    number = TRN2.number("hbm_bytes_per_s")
    assert (number.value, number.unit, number.text) == (2_900 * 10**9, "B/s", "2.9TB/s")
    assert number.status == "published" and number.conflict.endswith("3 TB/s")
    message = "^number: hbm_byte is not valid; .*; nearest valid: hbm_bytes$"
    with pytest.raises(BadInput, match=message):
        TRN2.number("hbm_byte")


def test_assumed_lists_what_nobody_publishes() -> None:
    assert {"core_barrier_ps", "link_bytes_per_s.torus", "cc_step_ps"} <= set(TRN2.assumed())
    assert {TRN2.number(key).status for key in TRN2.assumed()} <= {"assumed", "calibrated"}
    assert "hbm_bytes" not in TRN2.assumed()


def test_peak_of_a_dtype_without_a_tensor_rate() -> None:
    with pytest.raises(BadInput, match="^dtype: i32 is not valid; allowed: one of bf16, f16"):
        TRN2.peak("i32")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": ""}, "source missing"),
        ({"unit": None}, "unit missing"),
        ({"status": "guessed"}, "status 'guessed' is not one of published, measured, derived, "),
        ({"status": "assumed"}, "a number that is assumed needs a note"),
        ({"status": "derived"}, "a number that is derived needs a note"),
        ({"value": 850}, 'value 850 needs text with a unit, such as "4KiB" or "1us"'),
        ({"value": "1GB"}, "time: 1GB is not valid; allowed: a number with a unit of ps"),
        ({"unit": "cycles"}, "value '1us' is text, but unit 'cycles' takes a number"),
        ({"sauce": "x"}, "unknown field sauce"),
    ],
)
def test_a_bad_entry_names_file_and_key(change: dict, message: str) -> None:
    table = {"dma_fixed_ps": GOOD | change}
    with pytest.raises(BadFile) as caught:
        dict(read_entries(table, "trainium2.toml", "dma"))
    assert str(caught.value).startswith(f"trainium2.toml: [dma] dma_fixed_ps: {message}")


def test_a_bare_number_in_a_file_is_refused() -> None:
    with pytest.raises(BadFile, match=r"^x\.toml: \[dma\] dma_rings: not a table of value, unit"):
        dict(read_entries({"dma_rings": 16}, "x.toml", "dma"))


def test_missing_and_unknown_keys_name_the_file() -> None:
    identity, numbers = read_spec("trainium2")
    less = {key: number for key, number in numbers.items() if key != "hbm_bytes"}
    with pytest.raises(BadFile, match=r"^trainium2\.toml: missing hbm_bytes$"):
        chip_of("trainium2", identity, less)
    more = numbers | {"hbm_color": numbers["hbm_bytes"]}
    with pytest.raises(BadFile, match=r"^trainium2\.toml: unknown hbm_color$"):
        chip_of("trainium2", identity, more)
