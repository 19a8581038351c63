"""Tools: functions that an agent can call, their results, and servers that offer them.

A `Tool` returns *what happened*; the environment decides what that means for the task. ``@tool``
makes one from a function::

    @tool
    def add(a: int, b: int) -> int:
        '''Add two numbers.'''
        return a + b
"""

import contextlib
import functools
import inspect
import json
import pkgutil
import reprlib
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, ModuleType
from typing import Any, Final, Protocol, Self, overload, runtime_checkable

import docstring_parser
import pydantic

from agent_envs.core.async_bridge import call_with_deadline, submit
from agent_envs.core.lookup import lookup_or_import
from agent_envs.errors import ConfigurationError

DEFAULT_TIMEOUT_SECONDS: Final = 30.0
DEFAULT_MAX_RESULT_CHARS: Final = 8_000
MAX_ARGUMENT_CHARS: Final = 20_000
MAX_ARGUMENT_DEPTH: Final = 20
"""Limits of the arguments of a `ForeignTool`."""

TOOL_ERROR_TEXT: Final = (
    "The tool '{name}' failed ({exception}). Change the arguments, or go on without it."
)
TOOL_TIMEOUT_TEXT: Final = (
    "The tool '{name}' gave no result within {timeout:g} seconds. Ask for less, or go on "
    "without it."
)
RESULT_CUT_TEXT: Final = "\n[cut: {num_chars} more characters]"


_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = 120


def quoted(text: str) -> str:
    """Return a text in quotes for a message; a long one is shortened in the middle."""
    return _SHORT.repr(text)


class ToolError(Exception):
    """Raise it in a tool to show the model a custom message."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a tool call: the text for the model, and JSON-able data for the environment."""

    content: str
    data: Any = None
    error: str | None = None
    """A short code if the call failed: ``tool_error``, ``tool_timeout``."""
    exception: str | None = None
    """Type and message of the tool's exception, for the log; never shown to the model."""
    num_cut_chars: int = 0


class Tool:
    """A function that a model may call, with the schema of its arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float | None = DEFAULT_TIMEOUT_SECONDS,
        max_result_chars: int = DEFAULT_MAX_RESULT_CHARS,
        stateful: bool = False,
    ) -> None:
        """Make a tool from a function with type hints and a Google-style docstring.

        Args:
            function: Sync or async; returns a `ToolResult`, a string, or anything JSON-able.
            name: The function's own name if not given.
            description: The text of the docstring if not given.
            timeout: Seconds a call may take. ``None`` runs it in the caller's thread without a
                limit: only for code known to return quickly.
            max_result_chars: Longer results are cut, and say so.
            stateful: Whether a call depends on what other calls changed, or changes something
                itself. Calls of one turn run concurrently, except those of stateful tools and those
                without a timeout. Snapshots copy the state of a method's object, and replay any
                other state.
        """
        self.function = function
        self.name = name or function.__name__
        self.description = description or (_documentation(function).description or "").strip()
        if not self.description:
            raise ConfigurationError(f"Tool {self.name!r} has no docstring and no description=.")
        self.timeout = timeout
        self.max_result_chars = max_result_chars
        self.stateful = stateful
        self.parameters: dict[str, Any] = _strip_titles(self._arguments.model_json_schema())

    @functools.cached_property
    def _arguments(self) -> type[pydantic.BaseModel]:
        return _arguments_model(self.name, self.function)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by name, or else by the attributes that can be pickled."""
        function: Any = inspect.unwrap(self.function)
        path = f"{function.__module__}:{getattr(function, '__qualname__', '')}"
        with contextlib.suppress(ImportError, AttributeError, ValueError):
            if pkgutil.resolve_name(path) is self:  # decorated in place
                return pkgutil.resolve_name, (path,)
        attributes = {name: value for name, value in vars(self).items() if name != "_arguments"}
        return object.__new__, (type(self),), attributes

    @property
    def schema(self) -> dict[str, Any]:
        """The function schema in the OpenAI format."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": json.loads(json.dumps(self.parameters)),
            },
        }

    def renamed(self, name: str) -> Self:
        """Return the same tool under another name."""
        tool = object.__new__(type(self))  # a copy may be the same object, as a pickle is
        vars(tool).update(vars(self), name=name)
        return tool

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments converted to the function's types; a ValueError names wrong ones."""
        try:
            model = self._arguments.model_validate(dict(arguments))
        except pydantic.ValidationError as error:
            raise ValueError(_explain(error)) from None
        return {name: getattr(model, name) for name in self._arguments.model_fields}

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Run the function on valid arguments; its exceptions, and a timeout, pass through."""
        value = call_with_deadline(lambda: self.function(**arguments), self.timeout)
        if isinstance(value, str):
            value = ToolResult(value)
        elif not isinstance(value, ToolResult):
            value = ToolResult(json.dumps(value, ensure_ascii=False), data=value)
        return self._cut(value)

    def run(self, /, **arguments: Any) -> ToolResult:
        """Run the function; an exception becomes a result with an error code."""
        try:
            return self(**arguments)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # noqa: BLE001 - foreign code; it is recorded
            kind, code = type(error).__name__, "tool_error"
            text = TOOL_ERROR_TEXT.format(name=self.name, exception=kind)
            if isinstance(error, TimeoutError):
                text = TOOL_TIMEOUT_TEXT.format(name=self.name, timeout=self.timeout or 0)
                code = "tool_timeout"
            elif isinstance(error, ToolError):
                text = str(error)
            return self._cut(ToolResult(text, error=code, exception=f"{kind}: {error}"))

    def has_state_outside(self, env: object) -> bool:
        """Return whether the function may keep state that is not in attributes of `env`."""
        holder = getattr(self.function, "__self__", self.function)
        if isinstance(holder, FunctionType):
            return self.stateful
        return holder is not env and not isinstance(holder, type | ModuleType | functools.partial)

    def _cut(self, result: ToolResult) -> ToolResult:
        excess = len(result.content) - self.max_result_chars
        if excess <= 0:
            return result
        kept = result.content[: self.max_result_chars]
        content = kept + RESULT_CUT_TEXT.format(num_chars=excess)
        return replace(result, content=content, num_cut_chars=excess)


class SchemaTool(Tool):
    """A schema without a function: the caller of the environment runs it."""

    def __init__(
        self, name: str, description: str = "", parameters: Mapping[str, Any] | None = None
    ) -> None:
        """Take name, description and parameters, in the OpenAI format."""
        self.name, self.description, self.parameters = name, description, dict(parameters or {})
        self.timeout, self.max_result_chars, self.stateful = None, 0, True
        self.function = self.__call__

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged; who runs the tool validates them."""
        return dict(arguments)

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Raise an error."""
        raise NotImplementedError(f"{self.name!r} does not run here: env.step(write_call(...)).")


class ForeignTool(Tool):
    """A function of a benchmark with a given schema; only the size of arguments is checked.

    The benchmark itself judges their values: wrong ones are passed on unchanged.
    """

    def __init__(
        self, name: str, description: str, parameters: Mapping[str, Any],
        function: Callable[[Mapping[str, Any]], ToolResult], *, max_result_chars: int,
    ) -> None:  # fmt: skip
        """Make a tool; `function` takes the arguments as a mapping."""
        self.name, self.description, self.parameters = name, description, dict(parameters)
        self.timeout, self.stateful, self.max_result_chars = None, True, max_result_chars
        self.function = function

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments unchanged; a ValueError if they are too long or too deep."""
        waiting: list[tuple[Any, int]] = [(dict(arguments), 0)]
        num_chars = 0
        while waiting:
            value, depth = waiting.pop()
            num_chars += len(value) if isinstance(value, str) else 1
            if depth > MAX_ARGUMENT_DEPTH:
                raise ValueError(f"they are nested deeper than {MAX_ARGUMENT_DEPTH} levels")
            if isinstance(value, int) and abs(value) > 10**18:
                raise ValueError("they hold an integer of more than 18 digits")
            if num_chars > MAX_ARGUMENT_CHARS:
                raise ValueError(f"they hold more than {MAX_ARGUMENT_CHARS} characters")
            if isinstance(value, dict):
                value = [piece for pair in value.items() for piece in pair]
            if isinstance(value, list):
                waiting += [(piece, depth + 1) for piece in value]
        return dict(arguments)

    def __call__(self, /, **arguments: Any) -> ToolResult:
        """Run the function; an argument may have any name."""
        return self._cut(self.function(arguments))


def run_calls(calls: Sequence[tuple[Tool, Mapping[str, Any]]]) -> Iterator[ToolResult]:
    """Yield the result of each call, in order.

    Of several calls, those of tools without state start at once, each in its own thread; the others
    run one after the other.
    """
    runs = [functools.partial(tool.run, **arguments) for tool, arguments in calls]
    started = {
        number: submit(runs[number])
        for number, (tool, _) in enumerate(calls)
        if len(calls) > 1 and tool.timeout is not None and not tool.stateful
    }
    for number, run in enumerate(runs):
        yield started[number].result() if number in started else run()


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(**options: Any) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Any
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a `Tool` from a function: ``@tool``, or ``@tool(timeout=5.0)``, as for `Tool`."""
    if function is not None:
        return Tool(function)
    return lambda decorated: Tool(decorated, **options)


def _documentation(function: Callable[..., Any]) -> docstring_parser.Docstring:
    return docstring_parser.parse(inspect.getdoc(function) or "")


def _arguments_model(name: str, function: Callable[..., Any]) -> type[pydantic.BaseModel]:
    texts = {p.arg_name: p.description or "" for p in _documentation(function).params}
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for parameter in inspect.signature(function).parameters.values():
        is_named = parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not is_named or parameter.name not in hints:
            raise ConfigurationError(
                f"Tool {name!r}: parameter {parameter.name!r} has no "
                f"{'type hint' if is_named else 'schema; name each parameter'}."
            )
        default = ... if parameter.default is parameter.empty else parameter.default
        field = pydantic.Field(default, description=texts.get(parameter.name) or None)
        fields[parameter.name] = (hints[parameter.name], field)
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=False)
    return pydantic.create_model(name, __config__=config, **fields)


def _strip_titles(schema: Any) -> Any:
    """Drop the titles and ``additionalProperties`` that pydantic adds."""
    if isinstance(schema, dict):
        return {
            key: _strip_titles(value)
            for key, value in schema.items()
            if not (key == "title" and isinstance(value, str))
            and not (key == "additionalProperties" and value is False)
        }
    return [_strip_titles(item) for item in schema] if isinstance(schema, list) else schema


def _explain(error: pydantic.ValidationError) -> str:
    texts = {
        "missing": "'{0}' is missing",
        "extra_forbidden": "'{0}' is not an argument of this tool",
    }
    return "; ".join(
        texts.get(each["type"], "'{0}': {1}").format(
            ".".join(map(str, each["loc"])), each["msg"][:1].lower() + each["msg"][1:]
        )
        for each in error.errors(include_url=False, include_context=False, include_input=False)
    )


RESERVED_NAMES: Final = frozenset({"answer", "think", "tool_call", "tool_response", "tools"})
"""Tags of the tool formats; a tool of a source with such a name is renamed."""


@runtime_checkable
class ToolSource(Protocol):
    """A source of tools, such as a server; ``tools=[...]`` takes it like a tool."""

    def open(self) -> Any:
        """Open the session of one environment.

        It has ``tools``, the tools of this episode; ``begin_episode()``, which discards what the
        last episode changed; and ``close()``.
        """


def chosen_tools(
    tools: Iterable[Tool | ToolSource | str] | None, optional: Mapping[str, Sequence[Tool]]
) -> list[Tool | ToolSource]:
    """Return what ``tools=`` names: tools of `optional`, import paths, tools and sources."""
    chosen: list[Tool | ToolSource] = []
    if isinstance(tools, str):
        raise ConfigurationError(f"tools= takes a list: tools=[{tools!r}].")
    for tool in tools or ():
        named: Any = tool
        if isinstance(tool, str):
            named = lookup_or_import(optional, tool, kind="tool")
        chosen += named if isinstance(named, list | tuple) else [named]
    for each in chosen:
        if not isinstance(each, Tool | ToolSource):
            raise ConfigurationError(
                f"tools= does not take {each!r}. Decorate functions with @tool."
            )
    return chosen


def offered_tools(tools: Mapping[str, Tool], sessions: Iterable[Any]) -> dict[str, Tool]:
    """Return `tools` and those of the sessions, renamed where a name is taken."""
    offered = dict(tools)
    for tool in (tool for session in sessions for tool in session.tools):
        name, number = tool.name, 1
        while name in offered or name in RESERVED_NAMES:
            number += 1
            name = f"{tool.name}_{number}"
        offered[name] = tool if name == tool.name else tool.renamed(name)
    return offered
