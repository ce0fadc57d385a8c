"""The mutants of a script, for mutants.py: each is its source with one change of the algorithm.

The algorithm is what stands above the line "From here on nothing is the algorithm's", but for the arguments,
and of what is below it NUMBERS, where logs, seeds and gradients come about. Statements within it that are
plumbing, or that only make it faster (PLUMBING), are left as they are.
"""

import ast
import re
import warnings
from typing import NamedTuple

BORDER = "From here on nothing is the algorithm's"
NUMBERS = "Run", "ended_episodes", "start_process", "seed_all", "over_processes", "flatten"
PLUMBING = re.compile(
    r"heartbeat|HEARTBEATS|atexit|signum|stop_signal|sys\.exit|\bfail|\bmessage\b|\bcauses\b|\bgood\b|writer"
    r"|\bbar\b|time_ns|tqdm|isatty|\btotal = |\block\(|start_logging|\bname\b.*replace|\bfolder\b"
    r"|_checkpoint\(|\bsaved\b|compile|cuda|Graph|\.close\(|\braise\b|\bexcept\b|keep_freed|warn_of|check_tasks|mallopt"
    r"|set_num_threads|set_flush_denormal"
)
OPERATORS = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "*"), ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"), ast.And: ("and", "or"), ast.Or: ("or", "and"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
}  # fmt: skip
NAMES = dict(min="max", minimum="maximum", amin="amax", argmin="argmax", any="all", mean="sum", floor="ceil")
NAMES |= dict(zeros="ones", zeros_="ones_", zeros_like="ones_like", sin="cos")
NAMES |= {b: a for a, b in NAMES.items()}
UNWRAPPED = set("detach abs copy clone clamp sqrt square float flatten squeeze".split())  # x.f() becomes x
SYMMETRIC = set("min max minimum maximum isinstance gcd".split())  # their arguments are not swapped


class Mutant(NamedTuple):
    function: str | None  # name of the function or class that is changed
    lines: range  # its lines
    first: int  # line at which the changed statement begins
    line: int  # that of the change
    operator: str
    old: str  # the changed lines
    new: str
    source: str  # the whole script

    @property
    def before(self):
        return " ".join(self.old.split())

    @property
    def after(self):
        return " ".join(self.new.split())

    @property
    def key(self):
        return str(self.line), self.before, self.after


def algorithm(source):
    """The statements of a script that may be changed, from top to bottom."""
    section, sections = None, []
    for line in source.splitlines():
        if title := re.match(r"# === (.*?) =+$", line):
            section = BORDER if BORDER in line else title[1]
        sections.append(section)
    for node in ast.parse(source).body:
        section = sections[node.lineno - 1]
        if section == BORDER and getattr(node, "name", "") not in NUMBERS:
            continue
        if section not in (None, "Arguments"):
            yield node


def mutants(source, names=("",)):
    """All mutants of a script's algorithm, or of the functions and classes of these names, that compile."""
    text, lines, starts = source.encode(), source.splitlines(keepends=True), [0]
    for line in lines:
        starts.append(starts[-1] + len(line.encode()))

    def begin(node):
        return starts[node.lineno - 1] + node.col_offset

    def end(node):
        return starts[node.end_lineno - 1] + node.end_col_offset

    def inner(node):
        return text[begin(node) : end(node)].decode()

    def swap(op, left, right):
        """Another operator between two operands."""
        old, new = OPERATORS[type(op)]
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), text[end(left) : begin(right)])
        at = end(left) + gap.index(old.encode())
        return f"{old} to {new}", at, at + len(old), new

    def edits_of_call(node):
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        if name in NAMES:
            yield f"{name} to {NAMES[name]}", end(node.func) - len(name), end(node.func), NAMES[name]
        if name in UNWRAPPED and isinstance(node.func, ast.Attribute):
            yield f"drop .{name}()", end(node.func.value), end(node), ""
        if len(node.args) > 1 and name not in SYMMETRIC and not isinstance(node.args[1], ast.Starred):
            a, b = node.args[:2]
            yield "swap arguments", begin(a), end(b), f"{inner(b)}, {inner(a)}"
        parts = sorted([*node.args, *node.keywords], key=begin)
        for before, part, after in zip([None, *parts], parts, [*parts[1:], None], strict=False):
            if isinstance(part, ast.keyword) and part.arg in NAMES:
                yield f"{part.arg} to {NAMES[part.arg]}", begin(part), begin(part) + 3, NAMES[part.arg]
            if isinstance(part, ast.keyword) and part.arg not in (None, "device"):  # there may be only one
                left, right = (begin(part), begin(after)) if after else (end(before or part), end(part))
                yield "drop argument", left if before or after else begin(part), right, ""

    def edits(node):
        """(operator, begin, end, new text) for each change of a node itself."""
        match node:
            case ast.BinOp(left, op, right) | ast.AugAssign(left, op, right) if type(op) in OPERATORS:
                yield swap(op, left, right)
            case ast.BoolOp(op, values):
                yield from (swap(op, a, b) for a, b in zip(values, values[1:], strict=False))
            case ast.Compare(left, ops, right):
                yield from (swap(op, a, b) for a, op, b in zip([left, *right], ops, right, strict=False))
            case ast.UnaryOp(ast.Not() | ast.USub() | ast.Invert(), operand):
                yield "remove unary", begin(node), begin(operand), ""
            case ast.If(test) | ast.While(test) | ast.IfExp(test):
                yield "negate", begin(test), end(test), f"(not ({inner(test)}))"
            case ast.Constant(bool() as value):
                yield "negate", begin(node), end(node), str(not value)
            case ast.Constant(int() | float() as value):
                yield "constant", begin(node), end(node), repr(0 if value == 1 else value + 1)
            case ast.Slice(lower, upper):
                yield from (("drop bound", begin(x), end(x), "") for x in (lower, upper) if x)
            case ast.Call():
                yield from edits_of_call(node)
        match node:
            case ast.AugAssign() | ast.Expr(ast.Call()) | ast.Break() | ast.Continue():
                yield "delete statement", begin(node), end(node), "pass"
            case ast.Assign(targets) if all(isinstance(x, ast.Subscript | ast.Attribute) for x in targets):
                yield "delete statement", begin(node), end(node), "pass"

    def visit(node, first):
        """Edits of a node and of what is in it; first: the line at which its statement begins."""
        if isinstance(node, ast.stmt):
            first, body = node.lineno, getattr(node, "body", None)
            header = "".join(lines[first - 1 : max(first, body[0].lineno - 1) if body else node.end_lineno])
            words = getattr(node, "name", re.sub("  #.*", "", header))  # a function's or class's name
            if PLUMBING.search(words):
                if isinstance(node, ast.For | ast.While | ast.With):
                    for statement in body:
                        yield from visit(statement, first)
                return
        yield from ((first, *edit) for edit in edits(node))
        for name, value in ast.iter_fields(node):
            for child in value if isinstance(value, list) else [value]:
                is_left = name in ("annotation", "returns", "decorator_list") or isinstance(
                    child, ast.JoinedStr
                )
                if isinstance(child, ast.AST) and not is_left:
                    yield from visit(child, first)

    for statement in algorithm(source):
        if any(names) and getattr(statement, "name", "") not in names:
            continue
        upper, lower, seen = begin(statement), end(statement), {ast.dump(ast.parse(inner(statement)))}
        for first, operator, start, stop, new in visit(statement, statement.lineno):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # `1 is x`
                    tree = ast.dump(ast.parse(text[upper:start] + new.encode() + text[stop:lower]))
            except SyntaxError:
                continue
            if tree not in seen:
                seen.add(tree)
                left, right = text.rindex(b"\n", 0, start) + 1, text.index(b"\n", stop)
                change = text[left:right], text[left:start] + new.encode() + text[stop:right]
                change = *change, text[:left] + change[1] + text[right:]
                whole = range(statement.lineno, statement.end_lineno + 1)
                where = getattr(statement, "name", None), whole, first, text.count(b"\n", 0, start) + 1
                yield Mutant(*where, operator, *(x.decode() for x in change))


def in_copy(mutant, original, other):
    """Another script with the same change, if its function of that name has the line as often."""
    blocks = [x for x in ast.parse(other).body if getattr(x, "name", "") == mutant.function]
    if not blocks:
        return other
    size, lines, own = mutant.old.count("\n") + 1, other.split("\n"), original.split("\n")

    def places(lines, within):
        return [n for n in within if "\n".join(lines[n : n + size]) == mutant.old]

    here = places(own, range(mutant.lines.start - 1, mutant.lines.stop - 1))
    there = places(lines, range(blocks[0].lineno - 1, blocks[0].end_lineno))
    if len(here) == len(there):
        at = there[here.index(mutant.line - 1)]
        lines[at : at + size] = mutant.new.split("\n")
    return "\n".join(lines)
