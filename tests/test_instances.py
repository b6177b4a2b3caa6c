"""Instances: cores and capacity as published, wiring, logical cores, and what is shown of them."""

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trnsim.cluster.instances import Instance, fabric, instance_names, load_instance
from trnsim.cluster.lnc import (
    CoreAddress,
    LogicalCore,
    check_lnc,
    logical_per_chip,
    physical_cores,
    stack_of,
)
from trnsim.cluster.report.tables import overview_table, specs, specs_table, topology, topology_view
from trnsim.collectives.fabric import Fabric
from trnsim.device.chip import load_chip
from trnsim.device.errors import BadInput
from trnsim.device.numbers import NEED_NOTE
from trnsim.device.units import format_rate

GIB = 2**30
TRN1, TRN2, TRN3 = (load_chip(name) for name in ("trn1", "trn2", "trn3"))
TRN2_48XL = load_instance("trn2.48xlarge")

# name, chips, physical cores, logical cores, HBM GiB, EFA Gbps
PUBLISHED = [
    ("inf2.xlarge", 1, 2, 2, 32, 0),
    ("inf2.8xlarge", 1, 2, 2, 32, 0),
    ("inf2.24xlarge", 6, 12, 12, 192, 0),
    ("inf2.48xlarge", 12, 24, 24, 384, 0),
    ("trn1.2xlarge", 1, 2, 2, 32, 25),
    ("trn1.32xlarge", 16, 32, 32, 512, 800),
    ("trn1n.32xlarge", 16, 32, 32, 512, 1600),
    ("trn2.3xlarge", 1, 8, 4, 96, 200),
    ("trn2.48xlarge", 16, 128, 64, 1536, 3200),
    ("trn2u.48xlarge", 16, 128, 64, 1536, 3200),
    ("trn2-ultraserver", 64, 512, 256, 6144, 12800),
    ("trn3-gen1-ultraserver", 64, 512, 256, 9216, 12800),
    ("trn3-gen2-ultraserver", 144, 1152, 576, 20736, 28800),
]
# tools/neuron-sys-tools/neuron-ls.rst :50-68 and the driver's table for v3
NEURON_LS = {
    0: {12, 3, 4, 1}, 1: {13, 0, 5, 2}, 2: {14, 1, 6, 3}, 3: {15, 2, 7, 0},
    4: {8, 5, 7, 0}, 5: {4, 9, 1, 6}, 6: {10, 7, 5, 2}, 7: {6, 11, 3, 4},
    8: {4, 9, 11, 12}, 9: {8, 5, 13, 10}, 10: {6, 11, 9, 14}, 11: {10, 7, 15, 8},
    12: {0, 13, 15, 8}, 13: {12, 1, 9, 14}, 14: {2, 15, 13, 10}, 15: {11, 14, 3, 12},
}  # fmt: skip

all_instances = pytest.mark.parametrize("name", instance_names())


def chip_neighbours(one: Fabric) -> dict[int, set[int]]:
    names = [one.names[node] for node in one.chips.tolist()]
    return {
        chip: {names.index(near) for near in one.neighbours(name) if near in names}
        for chip, name in enumerate(names)
    }


def path(whole: Fabric, source: int, target: int) -> list[str]:
    found = whole.routes(np.array([source]), np.array([target]))
    return [whole.link_name(link) for link in found.path(0)]


def latency(whole: Fabric, source: int, target: int) -> int:
    return int(whole.routes(np.array([source]), np.array([target])).latency[0])


@pytest.mark.parametrize(("name", "chips", "physical", "logical", "hbm", "efa"), PUBLISHED)
def test_published_totals(name, chips, physical, logical, hbm, efa) -> None:
    instance = load_instance(name)
    assert (instance.chips, instance.physical_cores) == (chips, physical)
    assert instance.logical_cores() == logical
    assert instance.chips * instance.chip.hbm_bytes == hbm * GIB
    assert instance.efa_bytes_per_s == efa * 10**9 // 8


def test_the_table_above_has_every_instance() -> None:
    assert {row[0] for row in PUBLISHED} == set(instance_names())


@all_instances
def test_every_number_has_a_source(name: str) -> None:
    for key, number in load_instance(name).numbers.items():
        assert number.source, key
        assert number.note or number.status not in NEED_NOTE, key


def test_unknown_instance_gives_the_nearest() -> None:
    with pytest.raises(BadInput) as caught:
        load_instance("trn2.48xlarg")
    message = str(caught.value)
    assert message.startswith("instance: trn2.48xlarg is not valid; allowed: one of inf2.xlarge, ")
    assert message.endswith("; nearest valid: trn2.48xlarge")


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn1n.32xlarge", "trn2.48xlarge"])
def test_torus_neighbours_are_those_that_neuron_ls_prints(name: str) -> None:
    assert chip_neighbours(fabric(load_instance(name))) == NEURON_LS


def test_inf2_is_a_ring() -> None:
    near = chip_neighbours(fabric(load_instance("inf2.48xlarge")))
    assert near == {c: {(c - 1) % 12, (c + 1) % 12} for c in range(12)}


def test_ultraserver_is_four_tori_and_rings_of_four() -> None:
    one = fabric(load_instance("trn2-ultraserver"))
    for chip, near in chip_neighbours(one).items():
        server, inside = divmod(chip, 16)
        ring = {(server + step) % 4 * 16 + inside for step in (1, 3)}
        assert near == ring | {server * 16 + other for other in NEURON_LS[inside]}
    assert one.egress("chip0") == 4 * TRN2.link_rate("torus") + 2 * TRN2.link_rate("z")


@pytest.mark.parametrize(("name", "size"), [("trn3-gen1", 16), ("trn3-gen2", 4)])
def test_trn3_has_two_levels_of_switch_and_a_direct_twin(name: str, size: int) -> None:
    instance = load_instance(name)
    one, half, per_chip = fabric(instance), instance.chips // 2, 4
    assert instance.chips_per_server == size
    assert chip_neighbours(one) == {c: {(c + half) % (2 * half)} for c in range(2 * half)}
    assert path(one, 0, per_chip)[1:-1] == ["chip0->server-switch0", "server-switch0->chip1"]
    near, far = f"chip{size}", f"chip{half}"
    assert path(one, 0, size * per_chip)[1:-1] == [
        "chip0->rack-switch0",
        f"rack-switch0->{near}",
    ]
    assert path(one, 0, half * per_chip)[1:-1] == [f"chip0->{far}"]
    levels = ("server", "rack", "direct")
    assert one.egress("chip0") == sum(map(instance.chip.link_rate, levels))
    assert sum(instance.chip.link_bytes_per_s.values()) == (256 + 320 + 128) * 10**9


@all_instances
def test_ranks_are_ordered_by_node_chip_and_logical_core(name: str) -> None:
    instance = load_instance(name)
    nodes = 2 if instance.efa_bytes_per_s else 1
    whole = fabric(instance, nodes)
    per_chip = logical_per_chip(instance.chip, instance.chip.lnc_default)
    assert whole.ranks == nodes * instance.logical_cores()
    assert whole.rank_node.tolist() == [c for c in whole.chips.tolist() for _ in range(per_chip)]
    assert whole.rank_server.tolist() == sorted(whole.rank_server.tolist())
    assert len(set(whole.rank_server.tolist())) == nodes


@pytest.mark.parametrize("name", ["trn1.32xlarge", "trn2.3xlarge", "trn2.48xlarge", "trn3-gen2"])
def test_between_nodes_a_transfer_takes_the_network_and_its_latency(name: str) -> None:
    instance = load_instance(name)
    whole, per_node = fabric(instance, 2), instance.logical_cores()
    assert latency(whole, 0, per_node) == latency(whole, per_node - 1, 2 * per_node - 1)
    assert latency(whole, 0, per_node) == instance.chip.efa_latency_ps
    links = whole.routes(np.array([0]), np.array([per_node])).path(0)
    printed = instance.efa_bytes_per_s / instance.efa_devices
    assert min(whole.rate[links]) == pytest.approx(printed * instance.chip.efa_efficiency)
    for rank in range(1, per_node, 7):
        assert not [step for step in path(whole, 0, rank) if "nic" in step]


def test_latency_adds_up_over_hops() -> None:
    one = fabric(TRN2_48XL)
    hop, dma = TRN2.link_latency_ps, TRN2.on_chip_latency_ps
    assert [latency(one, 0, 4 * chip) for chip in (0, 1, 3, 5, 10)] == [
        dma if hops == 0 else dma + hops * hop for hops in (0, 1, 1, 2, 4)
    ]


def test_a_ranks_dma_grows_with_its_physical_cores() -> None:
    for lnc in (1, 2):
        whole = fabric(TRN2_48XL, lnc=lnc)
        rates = {int(whole.rate[link]) for link in (*whole.dma_out, *whole.dma_in)}
        assert rates == {lnc * TRN2.on_chip_bytes_per_s}


def test_nodes_need_efa() -> None:
    with pytest.raises(BadInput, match=r"^nodes: 2 .* allowed: 1: inf2\.48xlarge has no EFA"):
        fabric(load_instance("inf2.48xlarge"), 2)
    with pytest.raises(BadInput, match="^nodes: 0 is not valid; allowed: 1 or more; nearest valid"):
        fabric(TRN2_48XL, 0)


# --- logical cores ---


@pytest.mark.parametrize(
    ("chip", "lnc", "message"),
    [
        (TRN2, 3, "LNC: 3 is not valid; allowed: 1 or 2 on Trainium2 (trn2); nearest valid: 2"),
        (TRN3, 8, "LNC: 8 is not valid; allowed: 1 or 2 on Trainium3 (trn3); nearest valid: 2"),
        (TRN1, 2, "LNC: 2 is not valid; allowed: 1 on Trainium1 (trn1); nearest valid: 1"),
        (TRN2, 0, "LNC: 0 is not valid; allowed: 1 or 2 on Trainium2 (trn2); nearest valid: 1"),
    ],
)
def test_other_lnc_values_are_refused(chip, lnc: int, message: str) -> None:
    with pytest.raises(BadInput) as caught:
        check_lnc(chip, lnc)
    assert str(caught.value) == message


def test_default_lnc() -> None:
    assert [check_lnc(load_chip(n)) for n in ("inf2", "trn1", "trn2", "trn3")] == [1, 1, 2, 2]


@pytest.mark.parametrize(("chip", "lnc"), [(TRN1, 1), (TRN2, 1), (TRN2, 2), (TRN3, 1), (TRN3, 2)])
def test_logical_cores_partition_the_chip_and_stay_on_a_stack(chip, lnc: int) -> None:
    owned = [physical_cores(chip, lnc, k) for k in range(logical_per_chip(chip, lnc))]
    assert [core for own in owned for core in own] == list(range(chip.cores))
    for own in owned:
        assert len({stack_of(chip, core) for core in own}) == 1


@pytest.mark.parametrize(
    ("chip", "lnc", "gib", "sharers"),
    [(TRN1, 1, 16, 1), (TRN2, 1, 12, 2), (TRN2, 2, 24, 1), (TRN3, 1, 18, 2), (TRN3, 2, 36, 1)],
)
def test_hbm_of_a_logical_core(chip, lnc: int, gib: int, sharers: int) -> None:
    core = LogicalCore(chip, lnc)
    assert (core.hbm_bytes, core.sharers) == (gib * GIB, sharers)
    assert core.hbm_visible_bytes == chip.stack_bytes == gib * sharers * GIB
    assert core.hbm_bytes_per_s * logical_per_chip(chip, lnc) == chip.hbm_bytes_per_s
    assert core.peak("bf16") == lnc * chip.peak("bf16")
    assert core.dma_bytes_per_s == lnc * chip.dma_bytes_per_s


def test_outside_the_chip() -> None:
    with pytest.raises(BadInput, match="^logical core: 4 is not valid; allowed: 0 to 3 at LNC=2"):
        physical_cores(TRN2, 2, 4)
    with pytest.raises(BadInput, match="^physical core: 8 is not valid; allowed: 0 to 7"):
        stack_of(TRN2, 8)


def test_core_address_reads_and_sorts() -> None:
    address = CoreAddress(node=1, chip=15, logical=3, physical=6)
    assert str(address) == "node 1, chip 15, core 6 (logical 3)"
    assert eval(repr(address)) == address
    assert address < CoreAddress(1, 15, 3, 7) < CoreAddress(2, 0, 0, 0)


# --- what is shown ---


def shown(renderable) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def test_topology_u15() -> None:
    small = topology(load_instance("trn2.3xlarge"), lnc=2)
    assert [small[k] for k in ("chips", "physical_cores", "logical_cores")] == [1, 8, 4]
    large = topology(TRN2_48XL, lnc=2)
    assert [large[k] for k in ("chips", "physical_cores", "logical_cores")] == [16, 128, 64]
    assert large["hbm_bytes_per_logical_core"] == 24 * GIB
    assert {int(n[4:]) for n in large["neighbours"]["chip5"]} == NEURON_LS[5]


@given(nodes=st.integers(1, 1000), lnc=st.sampled_from([1, 2]))
def test_topology_counts_scale_with_nodes(nodes: int, lnc: int) -> None:
    facts = topology(load_instance("trn2.3xlarge"), nodes=nodes, lnc=lnc)
    assert facts["physical_cores"] == lnc * facts["logical_cores"] == 8 * nodes
    assert facts["hbm_bytes_per_logical_core"] * facts["logical_cores"] == nodes * 96 * GIB


@all_instances
def test_links_of_the_topology_are_those_of_the_fabric(name: str) -> None:
    instance: Instance = load_instance(name)
    one, facts = fabric(instance), topology(instance)
    wires = [row for row in facts["links"] if row["kind"] not in ("on_chip", "efa")]
    assert sum(row["count"] for row in wires) == np.count_nonzero(one.source != one.target)
    total = sum(row["count"] * row["bytes_per_s"] for row in wires)
    assert total == one.rate[one.source != one.target].sum()
    assert all(row["status"] for row in facts["links"])


@pytest.mark.parametrize("name", ["inf2", "trn1", "trn2", "trn3"])
def test_specs_show_every_number_once(name: str) -> None:
    chip = load_chip(name)
    assert sorted(row["name"] for row in specs(chip)) == sorted(chip.numbers)
    text = shown(specs_table(chip))
    assert all(key in text for key in chip.numbers)


def test_tables_say_what_a_user_asks() -> None:
    text = shown(topology_view(TRN2_48XL, lnc=1, nodes=2))
    for part in (
        "2 x trn2.48xlarge",
        "256 (8 per chip)",
        "LNC=1",
        "12 GiB, half of a 24 GiB stack",
    ):
        assert part in text
    for part in (format_rate(TRN2.link_rate("torus")), "assumed", "1, 3, 4, 12"):
        assert part in text
    overview = shown(overview_table([TRN1, TRN2]))
    assert "2.9 TB/s*" in overview and "32 GiB " in overview
