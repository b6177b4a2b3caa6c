"""The lint: Python that runs here and that the hardware's compiler refuses, each rule once."""

# pyright: reportUnusedVariable=false, reportUnusedClass=false, reportUnusedExpression=false
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportArgumentType=false
# ruff: noqa: E731, F841, B018, F401
# The kernels here are wrong on purpose, and never run.
import functools
import inspect
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trnsim.device.nki.lint import RULES, Finding, grouped, lint

from . import nki_kernels
from .nki_command import run_command
from .nki_kernels import nisa, nki, nl

STATE = 0


def line_of(function, text) -> int:
    """The number of the first line of a function's source that has the text."""
    lines, first = inspect.getsourcelines(function)
    return next(first + i for i, line in enumerate(lines) if text in line)


def rules(kernel, *arguments) -> list[tuple[int, str]]:
    return [(finding.line, finding.rule) for finding in lint(kernel, arguments)]


# ---- one wrong thing each ----------------------------------------------------------------------


def inner_function(x):
    def twice(y):  # here
        nisa.tensor_scalar(y, y, nl.multiply, 2.0)

    twice(x)


def inner_class(x):
    class Shape:  # here
        pass


def lambdas(x):
    op = lambda a: a  # here


def comprehension(x):
    return [x[i] for i in range(4)]  # here


def generator_expression(x):
    return sum(n for n in x.shape)  # here


def generator(x):
    yield x  # here


async def asynchronous(x):  # here
    return x


def tried(x):
    try:  # here
        x.shape
    except ValueError:
        pass


def raised(x):
    if x.shape[0] > 128:
        raise ValueError  # here


def matched(x):
    match x.shape[0]:  # here
        case 128:
            pass


def deleted(x):
    y = x
    del y  # here


def imported(x):
    import math  # here


def globals_(x):
    global STATE  # here
    STATE = 1


def walrus(x):
    if (n := x.shape[0]) > 1:  # here
        pass


def set_(x):
    return {1, 2}  # here


def opened(x):
    with open("f") as file:  # here
        pass


def starred(x):
    return nl.ndarray(*x.shape)  # here


def keyword_star(x, options):
    return nl.ndarray(x.shape, **options)  # here


def varargs(x, *rest):  # here
    return x


def keyword_only(x, *, flag=True):  # here
    return x


@nki.jit
def list_default(x, stride=[1, 1]):  # here # noqa: B006
    return x


def identity(x, flag):
    if flag is None:  # here
        return x


def matmul_operator(x, y):
    return x @ y  # here


def loop_body_return(x, register):
    def body(i):
        return i  # here

    nl.fori_loop(0, register, body)


def loop_target(x):
    for i, size in enumerate(x.shape):  # here
        print(i, size)


def loop_else(x):
    for _ in range(4):
        pass
    else:
        x.shape  # here


def tuple_of_elements(x):
    names = [0, 0]
    names[0], names[1] = x.shape  # here


def several_indices(x):
    table = {}
    table[0, 1] = x  # here


def format_spec(x):
    print(f"{x.shape[0]:>8}")  # here


def dictionary_key(x):
    return {1: x}  # here


def large_integer(x):
    return 1 << 40, 0x1_0000_0000  # here


@functools.cache  # here
def decorated(x):
    return x


def dynamic_in_no_reorder(x, register):
    with nl.no_reorder():
        for _ in nl.dynamic_range(register):  # here
            pass


WRONG = [
    (inner_function, "inner-function"), (inner_class, "inner-class"), (lambdas, "lambda"),
    (comprehension, "comprehension"), (generator_expression, "comprehension"),
    (generator, "generator"), (asynchronous, "async"), (tried, "try"), (raised, "raise"),
    (matched, "match"), (deleted, "del"), (imported, "import"), (globals_, "global"),
    (walrus, "walrus"), (set_, "set"), (opened, "with"), (starred, "star"), (keyword_star, "star"),
    (varargs, "varargs"), (keyword_only, "keyword-only"), (list_default, "list-argument"),
    (identity, "is"), (matmul_operator, "matmul-operator"), (loop_body_return, "loop-body-return"),
    (loop_target, "loop-target"), (loop_else, "loop-else"), (tuple_of_elements, "tuple-assignment"),
    (several_indices, "tuple-assignment"), (format_spec, "format-spec"),
    (dictionary_key, "dictionary-key"), (large_integer, "integer"),
    (dynamic_in_no_reorder, "dynamic-in-no-reorder"),
]  # fmt: skip


@pytest.mark.parametrize("kernel, rule", WRONG, ids=lambda value: getattr(value, "__name__", value))
def test_each_rule_finds_its_line_and_nothing_else(kernel, rule):
    plain = getattr(kernel, "function", kernel)
    assert rules(kernel) == [(line_of(plain, "# here"), rule)]


def test_the_legacy_package_is_found_inside_a_kernel():
    legacy = ModuleType("neuronxcc.nki.language")

    def kernel(x):
        return legacy.load(x)  # inside

    assert rules(kernel) == [(line_of(kernel, "# inside"), "legacy")]


def test_every_rule_has_its_test():
    elsewhere = {"decorator", "class-base", "legacy"}
    assert {rule for _, rule in WRONG} | elsewhere == set(RULES)


def test_decorators_of_the_callers_python_are_found_where_they_stand():
    def kernel(x):
        return decorated(x)

    found = [finding for finding in lint(decorated.__wrapped__) if finding.rule == "decorator"]
    assert [finding.line for finding in found] == [line_of(decorated.__wrapped__, "# here")]


class Plain:
    """No NKIObject."""

    def area(self):
        return [1 for _ in "a"]


class Config(nl.NKIObject):
    size: int = 4

    def doubled(self):
        return self.size * 2


def uses_classes(x):
    return Plain(), Config(4).doubled()


def test_classes_that_a_kernel_uses_inherit_from_nki_object():
    assert rules(uses_classes) == [
        (line_of(Plain, "class Plain"), "class-base"),
        (line_of(Plain, "for _ in"), "comprehension"),
    ]


def helper(x):
    return [x]


def deep(x):
    return comprehension(x)


@nki.jit
def calls_helpers(x):
    helper(x)
    return deep(x)


def test_what_a_kernel_calls_in_its_file_is_looked_at_and_what_it_does_not_is_not():
    expected = [(line_of(comprehension, "# here"), "comprehension")]
    assert rules(calls_helpers) == expected
    assert rules(helper) == []


def test_functions_that_a_kernel_closes_over_are_looked_at():
    def kernel(x):
        inner(x)

    def inner(x):
        yield x  # in inner

    assert rules(kernel) == [(line_of(inner, "yield x"), "generator")]


@nki.jit
def bodies_of_loops(x, count):
    register = nisa.register_alloc(count)

    def body(i):
        nisa.tensor_scalar(x, x, nl.add, 1.0)

    nl.fori_loop(0, register, body)
    with nl.no_reorder():
        nisa.tensor_scalar(x, x, nl.add, 1.0)


def test_bodies_of_dynamic_loops_are_allowed_inside():
    assert rules(bodies_of_loops) == []


def test_lists_are_no_arguments():
    line = line_of(helper, "def helper")
    assert rules(helper, np.zeros(1), [1, 2]) == [(line, "list-argument")]
    assert rules(helper, np.zeros(1), (1, 2)) == []


def test_the_kernels_of_these_tests_are_clean():
    kernels = [value for value in vars(nki_kernels).values() if isinstance(value, nki.Kernel)]
    assert len(kernels) > 5
    # only the tests' own shorthand: a lambda as the body of nl.fori_loop
    assert {f.rule for kernel in kernels for f in lint(kernel)} == {"lambda"}


def test_a_kernel_without_source_has_no_findings():
    space: dict = {}
    exec("def kernel(x):\n    return [y for y in x]\n", space)
    assert lint(space["kernel"]) == ()


def test_findings_print_their_place_and_what_to_write():
    finding = Finding("k.py", 3, "is")
    assert str(finding) == f"k.py:3: is: {RULES['is']}"
    assert "compare with == or !=" in finding.message


def test_one_line_for_each_rule_of_a_file():
    found = [Finding("k.py", line, "is") for line in range(1, 13)]
    text = str(found[0])
    assert grouped([found[0], Finding("k.py", 3, "del"), found[4]]) == (
        f"{text}; also at 5",
        f"k.py:3: del: {RULES['del']}",
    )
    assert grouped(found) == (f"{text}; also at 2, 3, 4, 5, 6, 7, 8, 9 and 3 more",)


# ---- on the command line -----------------------------------------------------------------------

SOURCE = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def double(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tiles = [nl.load(x) for _ in range(1)]
    nisa.tensor_scalar(tiles[0], tiles[0], nl.multiply, 2.0)
    nl.store(out, tiles[0])
    return out if x is not None else None
"""


@pytest.fixture
def double(tmp_path):
    (tmp_path / "double.py").write_text(SOURCE)
    return tmp_path / "double.py"


def run(capsys, monkeypatch, double: Path, *options: str) -> tuple[int, str, str]:
    words = [f"{double}:double", "--arg", "f32[128,8]", "--trace", f"{double}.json"]
    return run_command(capsys, monkeypatch, *words, *options)


def test_the_command_warns_and_runs(capsys, monkeypatch, double):
    code, _, err = run(capsys, monkeypatch, double)
    assert code == 0 and Path(f"{double}.json").exists()
    assert err.splitlines() == [
        f"{double}:9: comprehension: {RULES['comprehension']}",
        f"{double}:12: is: {RULES['is']}",
    ]
    code, _, err = run(capsys, monkeypatch, double, "--lint", "off")
    assert (code, err) == (0, "")


def test_the_command_takes_a_file_of_a_package(capsys, monkeypatch, tmp_path):
    package = tmp_path / "gold_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "sizes.py").write_text("FACTOR = 2.0\n")
    source = "from .sizes import FACTOR\n" + SOURCE.replace("2.0", "FACTOR")
    (package / "double.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = run(capsys, monkeypatch, package / "double.py", "--lint", "off", "--json")
    assert (code, err) == (0, "") and '"time_ps"' in out


def test_the_command_refuses_when_asked_to(capsys, monkeypatch, double):
    code, out, err = run(capsys, monkeypatch, double, "--lint", "error")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{double}:9: comprehension: a comprehension; write a loop" in err
    assert err.endswith("(and 1 more)\n") and not Path(f"{double}.json").exists()
