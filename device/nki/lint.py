"""What a kernel's Python has that the vendor's compiler refuses although it runs here.

The simulator runs a kernel as Python; the compiler reads its source and knows a subset. The rules
are those of the public pages and of the public front end (leanprover/KLR of March 2026); each
`RULES` entry names its source. A kernel and what it uses in its own file are looked at.
"""

import ast
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .kernel import Kernel

GUIDE = "NKI language guide"
MIGRATION = "NKI migration guide"
FRONT_END = "KLR front end"

RULES = {
    "inner-function": f"a function inside a function; move it out ({FRONT_END}). Bodies of "
    "nl.fori_loop and nl.while_loop are allowed",
    "inner-class": f"a class inside a function; move it out ({FRONT_END})",
    "lambda": f"lambda; define a function ({FRONT_END})",
    "comprehension": f"a comprehension; write a loop ({FRONT_END})",
    "generator": f"yield; kernels are no generators ({FRONT_END})",
    "async": f"async; kernels are synchronous ({FRONT_END})",
    "try": f"try; decide with if ({FRONT_END})",
    "raise": f"raise; use assert ({FRONT_END})",
    "match": f"match; use if and elif ({FRONT_END})",
    "del": f"del ({FRONT_END})",
    "import": f"an import inside a function; move it to the file's top ({FRONT_END})",
    "global": f"global or nonlocal; pass a dictionary or tensor ({FRONT_END})",
    "walrus": f"an assignment inside an expression ({FRONT_END})",
    "set": f"a set; the containers are tuples, lists and dictionaries ({GUIDE}, NKI Values)",
    "with": f"with, other than `with nl.no_reorder():` without a name ({FRONT_END}; nl.no_reorder)",
    "star": f"* or ** in a call or assignment; write the arguments out ({FRONT_END})",
    "varargs": f"a *args or **kwargs parameter ({FRONT_END})",
    "keyword-only": f"parameters behind a *; put them last with defaults ({MIGRATION}, 0.3)",
    "list-argument": f"a list as a kernel's argument; pass a tuple ({MIGRATION}, 0.3)",
    "is": f"is or is not; compare with == or !=, which they are compiled to ({MIGRATION}, 0.3)",
    "matmul-operator": f"@ between values; use nisa.nc_matmul ({FRONT_END})",
    "loop-target": f"several loop variables; unpack them inside the loop ({FRONT_END})",
    "loop-else": f"else of a loop ({FRONT_END})",
    "tuple-assignment": "an element or attribute among several targets, or an element with "
    f"several indices; assign each by itself ({FRONT_END})",
    "format-spec": f"a format specifier in an f-string ({FRONT_END})",
    "dictionary-key": f"a dictionary key that is no string ({GUIDE}, NKI Values)",
    "integer": f"an integer of more than 32 bits ({GUIDE}, NKI Values)",
    "decorator": f"a decorator other than nki.jit, dataclass and staticmethod ({FRONT_END})",
    "class-base": f"a class that does not inherit from NKIObject or Enum alone ({GUIDE}, "
    "Class Support)",
    "loop-body-return": "a value returned from the body of nl.fori_loop; keep it in SBUF or HBM "
    f"({MIGRATION}, 0.6)",
    "dynamic-in-no-reorder": "a dynamic loop inside nl.no_reorder; put no_reorder into the loop "
    f"({MIGRATION}, 0.6; nki-dynamic-loops)",
    "legacy": f"neuronxcc.nki inside a kernel ({MIGRATION}, 0.4)",
}
"""What is refused and what to write, with the public source that says so."""

_NODES: dict[type[ast.AST], str] = {
    ast.ClassDef: "inner-class", ast.Lambda: "lambda",
    ast.ListComp: "comprehension", ast.SetComp: "comprehension", ast.DictComp: "comprehension",
    ast.GeneratorExp: "comprehension", ast.Yield: "generator", ast.YieldFrom: "generator",
    ast.Await: "async", ast.AsyncFor: "async", ast.AsyncWith: "async",
    ast.AsyncFunctionDef: "async", ast.Try: "try", ast.TryStar: "try", ast.Raise: "raise",
    ast.Match: "match", ast.Delete: "del", ast.Import: "import", ast.ImportFrom: "import",
    ast.Global: "global", ast.Nonlocal: "global", ast.NamedExpr: "walrus", ast.Set: "set",
    ast.Starred: "star",
}  # fmt: skip
_DYNAMIC = frozenset({"fori_loop", "while_loop", "dynamic_range"})
_BODIES = ("fori_loop", "while_loop")
_LINES_SHOWN = 8
_DECORATORS = frozenset({"jit", "dataclass", "staticmethod"})
_BASES = frozenset({"NKIObject", "Enum", "NamedTuple"})
_INT32 = range(-(2**31), 2**32)  # signed or unsigned

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, order=True)
class Finding:
    """One place: `file` and `line` in it, the rule's name, and the rule's text."""

    file: str
    line: int
    rule: str

    @property
    def message(self) -> str:
        """What is refused there and what to write instead."""
        return RULES[self.rule]

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.rule}: {self.message}"


def grouped(findings: Sequence[Finding]) -> tuple[str, ...]:
    """One line of text for each rule of a file: its first place, and the lines of the others."""
    places: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        places.setdefault((finding.file, finding.rule), []).append(finding)
    return tuple(_with_others(first, others) for first, *others in places.values())


def _with_others(first: Finding, others: Sequence[Finding]) -> str:
    if not others:
        return str(first)
    lines = ", ".join(str(other.line) for other in others[:_LINES_SHOWN])
    more = len(others) - _LINES_SHOWN
    return f"{first}; also at {lines}" + (f" and {more} more" if more > 0 else "")


def lint(kernel: Any, arguments: Sequence[Any] = ()) -> tuple[Finding, ...]:
    """Findings in a kernel and the functions and classes of its file that it uses, by line.

    `arguments` are what it is called with, of which lists are findings too. A kernel without
    source (made by exec, or at a prompt) has none.
    """
    start = _plain(kernel)
    file = _file(start) or ""
    found: set[Finding] = set()
    for used, definition in _used(start, file):
        for place in _places(definition, _names(used)):
            found.add(Finding(file, *place))
        if used is start and any(isinstance(value, list) for value in arguments):
            found.add(Finding(file, definition.lineno, "list-argument"))
    return tuple(sorted(found))


# ---- what a kernel uses ----------------------------------------------------------------------


def _used(start: Any, file: str) -> Iterator[tuple[Any, Definition]]:
    """The kernel, and the functions and classes of its file that it names, with their source."""
    tree = _tree(file)
    seen: set[int] = set()
    waiting = [start]
    while waiting:
        used = waiting.pop()
        definition = None if id(used) in seen else _definition(used, tree)
        seen.add(id(used))
        if definition is None:
            continue
        yield used, definition
        names = _names(used)
        for node in ast.walk(definition):
            if isinstance(node, ast.Name) and node.id in names:
                other = _plain(names[node.id])
                if _file(other) == file:
                    waiting.append(other)


def _plain(value: Any) -> Any:
    return value.function if isinstance(value, Kernel) else value


def _file(value: Any) -> str | None:
    if inspect.isfunction(value):
        return value.__code__.co_filename
    if inspect.isclass(value):
        try:
            return inspect.getfile(value)
        except (TypeError, OSError):
            return None
    return None


def _names(used: Any) -> dict[str, Any]:
    """What the names of a function or class mean: its module's, and those it closes over."""
    if inspect.isclass(used):
        return vars(inspect.getmodule(used))
    closed = zip(used.__code__.co_freevars, used.__closure__ or (), strict=True)
    cells = {}
    for name, cell in closed:
        try:
            cells[name] = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    return {**used.__globals__, **cells}


def _tree(file: str) -> ast.Module:
    """The syntax of a file; an empty one of what cannot be read."""
    try:
        with open(file, encoding="utf-8") as source:
            return ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def _definition(used: Any, tree: ast.Module) -> Definition | None:
    """The source of a function or class, None without one."""
    wanted = used.__code__.co_firstlineno if inspect.isfunction(used) else None
    for node in ast.walk(tree):
        if isinstance(node, Definition) and node.name == getattr(used, "__name__", ""):
            first = min([node.lineno, *(mark.lineno for mark in node.decorator_list)])
            if wanted in (None, first):
                return node
    return None


# ---- the rules -------------------------------------------------------------------------------

Place = tuple[int, str]


def _places(definition: Definition, names: dict[str, Any]) -> list[Place]:
    """What is refused in one function or class, in which names mean what they mean."""
    places = _Places(definition, names)
    if isinstance(definition, ast.ClassDef):
        places.check_class(definition)
    else:
        places.check_function(definition)
        places.check_defaults(definition)
        for statement in definition.body:
            places.visit(statement)
    return places.found


def _loop_bodies(definition: Definition) -> dict[str, set[str]]:
    """Names that are passed to nl.fori_loop, and to nl.while_loop."""
    found: dict[str, set[str]] = {loop: set() for loop in _BODIES}
    for call in ast.walk(definition):
        if isinstance(call, ast.Call) and _last(call) in found:
            given = (*call.args, *(word.value for word in call.keywords))
            found[_last(call)].update(value.id for value in given if isinstance(value, ast.Name))
    return found


class _Places(ast.NodeVisitor):
    """Collects (line, rule) of one definition."""

    def __init__(self, definition: Definition, names: dict[str, Any]) -> None:
        self.names = names
        self.found: list[Place] = []
        self._bodies = _loop_bodies(definition)

    def add(self, node: Any, rule: str) -> None:
        """A finding at a node."""
        self.found.append((node.lineno, rule))

    def generic_visit(self, node: ast.AST) -> None:
        rule = _NODES.get(type(node))
        if rule:
            self.add(node, rule)
        super().generic_visit(node)

    # ---- definitions -------------------------------------------------------------------------

    def check_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Its parameters and decorators; async functions are none at all."""
        if isinstance(node, ast.AsyncFunctionDef):
            self.add(node, "async")
        if node.args.vararg or node.args.kwarg:
            self.add(node, "varargs")
        if node.args.kwonlyargs:
            self.add(node, "keyword-only")
        self._check_decorators(node, _DECORATORS)

    def check_defaults(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """A kernel's defaults are arguments like others: no lists."""
        marks = {_last(mark) for mark in node.decorator_list}
        if "jit" in marks and any(isinstance(value, ast.List) for value in node.args.defaults):
            self.add(node, "list-argument")

    def check_class(self, node: ast.ClassDef) -> None:
        """Its bases, decorators and methods."""
        bases = [_last(base) for base in node.bases]
        if len(bases) != 1 or bases[0] not in _BASES or node.keywords:
            self.add(node, "class-base")
        self._check_decorators(node, _DECORATORS)
        for statement in node.body:
            if isinstance(statement, ast.FunctionDef):
                self.check_function(statement)
                for inner in statement.body:
                    self.visit(inner)

    def _check_decorators(self, node: Definition, allowed: frozenset[str]) -> None:
        for mark in node.decorator_list:
            if _last(mark) not in allowed:
                self.add(mark, "decorator")

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """A function inside: the body of a dynamic loop, or refused."""
        loops = {loop for loop, bodies in self._bodies.items() if node.name in bodies}
        if not loops:
            self.add(node, "inner-function")
        if "fori_loop" in loops:
            self._check_returns(node)
        self.check_function(node)
        for statement in node.body:
            self.visit(statement)

    def _check_returns(self, body: ast.FunctionDef) -> None:
        for node in ast.walk(body):
            if isinstance(node, ast.Return) and node.value is not None:
                self.add(node, "loop-body-return")

    # ---- statements --------------------------------------------------------------------------

    def visit_Assign(self, node: ast.Assign) -> None:
        """Targets, then as any statement."""
        for target in node.targets:
            self._check_target(target)
        self.generic_visit(node)

    def _check_target(self, target: ast.expr) -> None:
        several = isinstance(target, ast.Tuple | ast.List)
        inside = target.elts if several else []
        elements = any(isinstance(part, ast.Subscript | ast.Attribute) for part in inside)
        indices = isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Tuple)
        if elements or indices:
            self.add(target, "tuple-assignment")

    def visit_For(self, node: ast.For) -> None:
        """One variable, no else."""
        if not isinstance(node.target, ast.Name):
            self.add(node.target, "loop-target")
        self._check_else(node)

    def visit_While(self, node: ast.While) -> None:
        """else is refused."""
        self._check_else(node)

    def _check_else(self, node: ast.For | ast.While) -> None:
        if node.orelse:
            self.add(node.orelse[0], "loop-else")
        self.generic_visit(node)

    def visit_With(self, node: ast.With) -> None:
        """`with nl.no_reorder():` is the one that there is."""
        call = node.items[0].context_expr
        plain = len(node.items) == 1 and node.items[0].optional_vars is None
        if not plain or not isinstance(call, ast.Call) or _last(call) != "no_reorder":
            self.add(node, "with")
        elif call.args or call.keywords:
            self.add(node, "with")
        else:
            self._check_no_reorder(node)
        self.generic_visit(node)

    def _check_no_reorder(self, node: ast.With) -> None:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call) and _last(inner) in _DYNAMIC:
                self.add(inner, "dynamic-in-no-reorder")

    # ---- expressions -------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        """`is` has no line of its own."""
        if any(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            self.add(node, "is")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """@ has no line of its own."""
        if isinstance(node.op, ast.MatMult):
            self.add(node, "matmul-operator")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`**` in a call; a lambda as the body of a dynamic loop is allowed as a function is."""
        if any(word.arg is None for word in node.keywords):
            self.add(node, "star")
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        """Keys are strings."""
        for key in node.keys:
            if key is None:
                self.add(node, "star")
            elif isinstance(key, ast.Constant) and not isinstance(key.value, str):
                self.add(key, "dictionary-key")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Integers have 32 bits."""
        if type(node.value) is int and node.value not in _INT32:
            self.add(node, "integer")

    def visit_FormattedValue(self, node: ast.FormattedValue) -> None:
        """No format specifier."""
        if node.format_spec is not None:
            self.add(node, "format-spec")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """A module of the legacy package."""
        meant = self.names.get(node.id)
        if isinstance(meant, ModuleType) and meant.__name__.startswith("neuronxcc"):
            self.add(node, "legacy")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """The annotation is not part of the program."""
        self._check_target(node.target)
        if node.value is not None:
            self.visit(node.value)


def _last(node: ast.AST) -> str:
    """The last part of a dotted name, or of what a call calls."""
    if isinstance(node, ast.Call):
        return _last(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
