"""The slips: one small change of a module's text at a time, of the kind that a refactoring makes."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import NamedTuple

_BORDER = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_OPPOSITE = {
    ast.Lt: ast.GtE, ast.LtE: ast.Gt, ast.Gt: ast.LtE, ast.GtE: ast.Lt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_ARITHMETIC = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_NAMES = {
    "min": "max", "minimum": "maximum", "any": "all", "floor": "ceil", "argmin": "argmax",
    "cumsum": "cumprod", "sum": "mean", "log1p": "log", "expm1": "exp", "isfinite": "isnan",
}  # fmt: skip
_NAMES |= {new: old for old, new in _NAMES.items()}


class Mutant(NamedTuple):
    """One changed place: where it is, what stood there, and what stands there now."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    text: str

    @property
    def name(self) -> str:
        """In one line, for lists."""
        return f"{self.path}:{self.line} {self._change}"

    @property
    def place(self) -> str:
        """A name that outlives other changes of the file: with the changed line in place of its number."""
        return f"{self._change} | {self.text.splitlines()[self.line - 1].strip()}"

    @property
    def _change(self) -> str:
        return f"{self.kind}: {' '.join(self.before.split())[:90]} -> {' '.join(self.after.split())[:90]}"


def mutants(path: str, text: str) -> list[Mutant]:
    """All mutants of a module, in the order of their places; each parses and differs from the original."""
    raw = text.encode()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found, seen, original = [], set(), ast.dump(ast.parse(text))
    for node, kind, new in _changes(ast.parse(text)):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        after = new if isinstance(new, str) else ast.unparse(new)
        after = f"({after})" if isinstance(node, ast.expr) and kind != "constant" else after
        changed = (raw[:begin] + after.encode() + raw[end:]).decode()
        try:
            same = ast.dump(ast.parse(changed)) == original
        except SyntaxError:
            continue
        if not same and changed not in seen:
            seen.add(changed)
            found.append(Mutant(path, node.lineno, kind, raw[begin:end].decode(), after, changed))
    return sorted(found, key=lambda m: m.line)


def _changes(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST | str]]:
    """Node, kind of slip, and what takes its place."""
    for node in _promising(tree):
        if isinstance(node, ast.Compare):
            yield from _compared(node)
        elif isinstance(node, ast.BoolOp):
            other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
            yield node, "and/or", ast.BoolOp(other, node.values)
            for i in range(len(node.values)):
                rest = node.values[:i] + node.values[i + 1 :]
                yield node, "part dropped", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            if not isinstance(node.operand, ast.Constant):
                yield node, "sign dropped", node.operand
        elif isinstance(node, ast.BinOp):
            yield from _computed(node)
        elif isinstance(node, ast.Constant):
            yield from _constants(node)
        elif isinstance(node, ast.If | ast.While):
            for value in (True, False) if isinstance(node, ast.If) else (False,):
                yield node.test, f"always {value}", ast.Constant(value)
        elif isinstance(node, ast.IfExp):
            yield node, "one branch", node.body
            yield node, "one branch", node.orelse
        elif isinstance(node, ast.Call):
            yield from _called(node)
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield test, "always True", ast.Constant(True)
        elif isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            changed = copy.deepcopy(node)
            changed.op = _ARITHMETIC[type(node.op)]()
            yield node, "operator", changed
            yield node, "statement dropped", "pass"
        elif isinstance(node, ast.Raise | ast.Continue | ast.Break) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        ):
            yield node, "statement dropped", "pass"


def _compared(node: ast.Compare) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    for i, op in enumerate(node.ops):
        for kind, table in (("border", _BORDER), ("opposite", _OPPOSITE)):
            if type(op) in table:
                ops = [*node.ops[:i], table[type(op)](), *node.ops[i + 1 :]]
                yield node, kind, ast.Compare(node.left, ops, node.comparators)


def _computed(node: ast.BinOp) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    if isinstance(node.left, ast.JoinedStr | ast.List) or isinstance(node.right, ast.JoinedStr | ast.List):
        return
    if type(node.op) in _ARITHMETIC:
        yield node, "operator", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
    if isinstance(node.op, ast.Mult | ast.Div | ast.Add | ast.Sub | ast.Pow | ast.MatMult):
        yield node, "factor forgotten", node.left
        if isinstance(node.op, ast.Mult | ast.Add | ast.MatMult):
            yield node, "factor forgotten", node.right


def _constants(node: ast.Constant) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    value = node.value
    if isinstance(value, bool):
        yield node, "constant", ast.Constant(not value)
    elif isinstance(value, int):
        yield node, "constant", ast.Constant(value + 1)
    elif isinstance(value, float):
        yield node, "constant", ast.Constant(1.1 * value if value else 1.0)


def _called(node: ast.Call) -> Iterator[tuple[ast.expr, str, ast.AST]]:
    last = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if last in _NAMES and not (last in ("sum", "mean") and isinstance(node.func, ast.Name)):
        func = copy.deepcopy(node.func)
        if isinstance(func, ast.Attribute):
            func.attr = _NAMES[last]
        else:
            func = ast.Name(_NAMES[last])
        yield node, "name", ast.Call(func, node.args, node.keywords)
    for i, keyword in enumerate(node.keywords):
        if keyword.arg is not None and last not in ("dataclass", "field", "Field", "ConfigDict"):
            rest = node.keywords[:i] + node.keywords[i + 1 :]
            yield node, "argument dropped", ast.Call(node.func, node.args, rest)


def _promising(tree: ast.Module) -> Iterator[ast.AST]:
    """Nodes whose change could matter: not annotations, words of errors, decorators, or names of types."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Call) and _only_words(node):
            continue
        yield node
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.AnnAssign | ast.ImportFrom | ast.Import):
            if isinstance(node, ast.AnnAssign) and node.value is not None:
                waiting.append(node.value)
            continue
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.FunctionDef):
            waiting.extend([*node.body, *node.args.defaults, *(d for d in node.args.kw_defaults if d)])
        elif isinstance(node, ast.ClassDef):
            waiting.extend(node.body)
        else:
            waiting.extend(ast.iter_child_nodes(node))


def _only_words(node: ast.Call) -> bool:
    """Whether a call only logs, warns or names a type."""
    return ast.unparse(node.func).rsplit(".", 1)[-1] in ("warn", "cast", "TypeVar")
