"""What we rely on in TRL, transformers and Accelerate: found in our code, kept in a table.

``python -m tests.agent_trainers.trainers.trl_contract`` writes `TABLE`: names that our code no
longer touches go, and how a name looks in the versions that are installed is added to how it looks
in others. Read what the library has changed first. To make the table anew, delete it and run this
with every set of versions (`make test` and `make test-oldest` have their own environments).
"""

import ast
import dataclasses
import hashlib
import importlib
import inspect
import json
import re
import sys
import textwrap
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import GradientState
from transformers import PreTrainedConfig, Trainer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import agent_trainers

TABLE = Path(__file__).with_suffix(".json")
LIBRARIES = ("trl", "transformers", "accelerate")
SOURCE = Path(agent_trainers.__file__).parent
NAMES_OF_TRAINERS = ("trainer", "_trainer")
"""What our code calls a trainer, beside `self`."""
OTHERS = (Accelerator, GradientState, PreTrainedConfig)
"""Classes on whose objects our code may touch private names."""
UNNAMED = (
    "trl.trainer.utils:RepeatSampler.__init__",  # has a generator of its own
    "trl.trainer.utils:RepeatSampler.__iter__",  # draws the order of an epoch from it
    "trl.trainer.utils:shuffle_sequence_dict",  # by rows
    "trl.trainer.utils:split_tensor_dict",  # by rows
    "trl:GRPOTrainer._calculate_rewards",  # is called only where our code overrides the caller
    "trl:GRPOTrainer.compute_loss",  # asks `_compute_loss`
)
"""What our code relies on without naming it."""
DOCUMENTED = f"{Trainer.__doc__} {TrainerCallback.__doc__} {GRPOTrainer.__doc__}"
NAMED_TUPLES = ("_asdict", "_replace")


# What our code touches


def touched_names(libraries):
    """Return what our code touches: name -> our files; and what it touches that is nowhere.

    A name is ``module:function`` or ``module:Class.member``.
    """
    found, unknown = defaultdict(set), defaultdict(set)
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCE.rglob("*.py")}
    own = {name for tree in trees.values() for name in _defined(tree)}
    for name in UNNAMED:
        found[name].add("the way that agent_trainers/trainers works")
    for path, tree in trees.items():
        file = path.relative_to(SOURCE.parent).as_posix()
        for name in [*_imported(tree), *_overridden(path)]:
            found[name].add(file)
        for base, attribute in _touched(tree):
            for name in (places := libraries.find(base, attribute, is_ours=attribute in own)):
                found[name].add(file)
            if not places and attribute not in own and (base == "trainer" or attribute[0] == "_"):
                unknown[attribute].add(file)
    return found, unknown


def _defined(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(getattr(node, "ctx", None), ast.Store):
            yield getattr(node, "attr", getattr(node, "id", None))


def _imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in LIBRARIES:
            yield from (f"{node.module}:{alias.name}" for alias in node.names)


def _overridden(path):
    """Yield what the classes of a file of ours override in classes of the libraries."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    module = importlib.import_module(".".join(parts).removesuffix(".__init__"))
    for kind in vars(module).values():
        if isinstance(kind, type) and kind.__module__ == module.__name__:
            for name, value in vars(kind).items():
                code = getattr(getattr(value, "fget", value), "__code__", None)
                if code is not None and code.co_filename == str(path):
                    owners = [owner for owner in _bases(kind) if name in vars(owner)]
                    yield from (f"{_place(owner)}.{name}" for owner in owners)


def _touched(tree):
    """Yield every attribute, and what it is one of: a trainer, its settings, or anything."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    in_trainers = {
        node for kind in classes if kind.name.endswith("Trainer") for node in ast.walk(kind)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not node.attr.startswith("__"):
            base = getattr(node.value, "attr", getattr(node.value, "id", ""))
            if base in NAMES_OF_TRAINERS or (base == "self" and node in in_trainers):
                base = "trainer"
            if node.attr not in NAMED_TUPLES:
                yield base, node.attr


# How it looks in the libraries


class Libraries:
    """The versions that are installed."""

    def __init__(self):
        """Read the trainers."""
        self.trainers = _bases(GRPOTrainer)
        self.overridden = {name for path in SOURCE.rglob("*.py") for name in _overridden(path)}
        self.assigned = {owner: defaultdict(dict) for owner in self.trainers}
        self.called = defaultdict(set)
        for owner in self.trainers:
            for member in vars(owner).values():
                if (function := _function(member)) is not None:
                    self._read(owner, function)

    def _read(self, owner, function):
        """Note what a method of a trainer assigns and calls of its own."""
        statements = defaultdict(list)
        for node in ast.walk(_tree(function)):
            if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in (part for whole in targets for part in ast.walk(whole)):
                    if _is_own(target) and isinstance(target.ctx, ast.Store):
                        statements[target.attr].append(node)
            elif isinstance(node, ast.Call) and _is_own(node.func):
                call = f"{owner.__name__}.{function.__name__}: {ast.unparse(node)}"
                self.called[node.func.attr].add(call)
        for name, nodes in statements.items():
            self.assigned[owner][name][function.__name__] = _digest(nodes)

    def find(self, base, attribute, *, is_ours):
        """Return the names of an attribute that our code touches, if it is one of a library."""
        if base in ("args", "_args") and attribute in _defaults():
            return [f"trl:GRPOConfig.{attribute}"]
        owners = self.trainers if base == "trainer" else []
        if base != "trainer" and attribute.startswith("_") and not is_ours:
            owners = [*self.trainers, *OTHERS]
        return [
            f"{_place(owner)}.{attribute}"
            for owner in owners
            if attribute in vars(owner) or attribute in self.assigned.get(owner, ())
        ]

    def look(self, name):
        """Return how a name looks; None if it is nowhere."""
        module, _, path = name.partition(":")
        owner, _, member = path.rpartition(".")
        try:
            scope = importlib.import_module(module)
            scope = getattr(scope, owner) if owner else scope
        except (ImportError, AttributeError):
            return None
        if scope is GRPOConfig and member in _defaults():
            return {"default": repr(_defaults()[member])}
        if assigned := self.assigned.get(scope, {}).get(member):
            is_documented = re.search(rf"\b{member}(\*\*| \()", DOCUMENTED)
            return {"is": "documented"} if is_documented else {"assigned": dict(assigned)}
        # the members of a class are its own; those of a module may be loaded when asked for
        value = vars(scope).get(member) if owner else getattr(scope, member, None)
        function = _function(value)
        if value is not None and function is None:
            return {"is": type(value).__name__}
        return function and self._form(name, member, function)

    def _form(self, name, member, function):
        """Return signature, body and callers of a function, as far as our code relies on them."""
        form = {"signature": _signature(function)}
        is_relied_on = name in UNNAMED or (
            # a constructor changes with any release; what it assigns is in the table by itself
            not member.startswith("__")
            and (name in self.overridden or member.startswith("_") or name.startswith("trl."))
        )
        if is_relied_on:
            form["body"] = _digest(_tree(function).body)
        if (calls := self.called.get(member)) and (name in self.overridden or name in UNNAMED):
            form["called"] = sorted(calls)
        return form


def _bases(kind):
    return [base for base in kind.__mro__ if base.__module__.split(".")[0] in LIBRARIES]


def _place(kind):
    """Return where a class is imported from: from the top of its library, if it is there."""
    root = kind.__module__.split(".")[0]
    is_on_top = getattr(sys.modules[root], kind.__name__, None) is kind
    return f"{root if is_on_top else kind.__module__}:{kind.__name__}"


def _defaults():
    return {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


def _function(member):
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    function = inspect.unwrap(member) if callable(member) else None
    return function if inspect.isfunction(function) else None


def _is_own(node):
    return isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self"


def _signature(function):
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=signature.empty))
    return re.sub(" at 0x[0-9a-f]+", "", text)


def _tree(function):
    """Return a function as a syntax tree."""
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except OSError:  # written by a library at run time, as a dataclass's methods are
        return ast.parse("def nothing(): pass").body[0]
    return tree


def _digest(nodes):
    return hashlib.sha256(json.dumps(_plain(nodes)).encode()).hexdigest()[:16]


def _plain(node):
    """Return a syntax tree as lists: without docstrings, and the same in each version of Python."""
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [
        [name, _plain(value)]
        for name, value in ast.iter_fields(node)
        if value not in (None, []) and name not in ("ctx", "kind", "type_comment", "type_params")
    ]
    return [type(node).__name__, *fields]


def _is_docstring(node):
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


# The table


def read_table():
    """Return the table; empty if there is none."""
    if not TABLE.exists():
        return {"versions": [], "names": {}}
    return json.loads(TABLE.read_text(encoding="utf-8"))


def versions():
    """Return the versions that are installed."""
    return ", ".join(f"{library} {version(library)}" for library in LIBRARIES)


def changes(table, libraries):
    """Return a line for each name of the table that looks as it does in none of its versions."""
    return [
        f"{name} {_difference(forms[-1], now)} ({', '.join(_files_with(name))})"
        for name, forms in table["names"].items()
        if (now := libraries.look(name)) not in forms
    ]


def _files_with(name):
    word = re.compile(rf"\b{re.split('[:.]', name)[-1]}\b")
    for path in sorted(SOURCE.rglob("*.py")):
        if word.search(path.read_text(encoding="utf-8")):
            yield path.relative_to(SOURCE.parent).as_posix()


def _difference(before, now):
    if now is None:
        return "is gone"
    parts = []
    for what in sorted({*before, *now}):
        old, new = before.get(what), now.get(what)
        if old == new:
            continue
        if what == "body":
            parts.append("has another body")
        elif isinstance(old, list) and isinstance(new, list):
            parts += [f"is no longer called in {call}" for call in old if call not in new]
            parts += [f"is called in {call}" for call in new if call not in old]
        elif what == "assigned" and old and new:
            places = sorted(p for p in {*old, *new} if old.get(p) != new.get(p))
            parts.append(f"is assigned otherwise in {', '.join(places)}")
        else:
            parts.append(f"has another {what}: {new} instead of {old}")
    return "; ".join(parts)


def main():
    """Bring the table up to date."""
    libraries, table = Libraries(), read_table()
    found, _ = touched_names(libraries)
    table["versions"] = sorted({*table["versions"], versions()})
    names = {}
    for name in sorted(found):
        forms, now = table["names"].get(name, []), libraries.look(name)
        names[name] = forms if now in forms or now is None else [*forms, now]
    table["names"] = names
    TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
