"""A command line from a settings record: a field of the dataclass is an option of the command.

    @dataclass(frozen=True, kw_only=True)
    class Brewing:
        cups: int = setting(2, "how many")
        json: bool = setting(False, "print JSON", "--json")

    @takes(Brewing)
    def brew(asked: Brewing) -> int: ...

Name, type, default and help of an option stand in its field and nowhere else. `takes(given(R))`
hands over only what was typed, as a dict: for commands whose defaults also come from a file or a
preset. The help then names a field's default itself, unless a preset says otherwise.

>>> @dataclass(frozen=True, kw_only=True)
... class Brewing:
...     cups: int = setting(2, "how many")
...     kind: str = setting("black", "green or black")
>>> [p.annotation.__metadata__[0].help for p in given(Brewing).parameters()]
['how many (default 2)', 'green or black (default)']
>>> given(Brewing).made({"cups": 3, "kind": None})
{'cups': 3}
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field
from functools import partial, wraps
from typing import Annotated, Any, Optional, get_args, get_type_hints

import typer

from noshuffle.errors import InvalidInput, utf8

Command = Callable[..., Any]


def setting(
    default: Any,
    text: str,
    *names: str,
    heading: str | None = None,
    check: Callable[..., None] | None = None,
) -> Any:
    """A field that is an option: its default (`...`: must be given), its help, its flags.

    `heading` is that of the help; `check` is one of the named checks of `noshuffle.errors`, which
    `check_fields` calls with the field as keyword unless it is None.
    """
    option = partial(typer.Option, *names, rich_help_panel=heading)
    return _field(default, text=text, option=option, check=check)


def argument(text: str, default: Any = ...) -> Any:
    """A field that is an argument of the command, without a flag."""
    return _field(default, text=text, option=typer.Argument)


def _field(default: Any, **metadata: Any) -> Any:
    return field(default=MISSING if default is ... else default, metadata=metadata)


#: What a value is called that a field of this type takes.
_KINDS: dict[Any, str] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def check_fields(record: Any) -> None:
    """Refuse values of another type (a file may hold any), and call the checks that fields have."""
    kinds = get_type_hints(type(record))
    for one in dataclasses.fields(record):
        check, value = one.metadata.get("check"), getattr(record, one.name)
        if value is None:
            continue
        if "option" in one.metadata:
            _check_kind(one.name, value, kinds[one.name])
        if check is not None:
            check(**{one.name: value})


def with_floats(record: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with whole numbers as floating-point ones where a field takes those.

    torch refuses a learning rate of 10²⁰ that is no float by an OverflowError of its own.
    """
    kinds = get_type_hints(record)

    def made(name: str, value: Any) -> Any:
        kind = kinds.get(name)
        if type(value) is not int or float not in (get_args(kind) or (kind,)):
            return value
        return float(value) if abs(value) < 10**300 else math.inf

    return {name: made(name, value) for name, value in values.items()}


def _check_kind(name: str, value: Any, kind: Any) -> None:
    """A field of type `kind` takes this value: a whole number is a number, true is none."""
    taken = [each for each in (get_args(kind) or (kind,)) if each is not type(None)]
    if not all(each in _KINDS for each in taken):
        return
    found = type(value)
    if not (found in taken or (found is int and float in taken)):
        words = " or ".join(_KINDS[each] for each in taken)
        raise InvalidInput(f"{name} must be {words}, got {value!r}")


@dataclass(frozen=True)
class Options:
    """The options of one record; `only_given` makes them optional and hands over a dict."""

    record: type[Any]
    only_given: bool = False

    def fields(self) -> Iterator[dataclasses.Field[Any]]:
        return (f for f in dataclasses.fields(self.record) if "option" in f.metadata)

    def parameters(self) -> Iterator[inspect.Parameter]:
        """What typer reads: one keyword a field."""
        kinds = get_type_hints(self.record)
        for one in self.fields():
            kind, default, text = kinds[one.name], one.default, one.metadata["text"]
            if self.only_given:
                text = _with_default(text, self._common_default(one))
                kind, default = Optional[kind], None  # noqa: UP045  (kind is known at run time)
            yield inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if default is MISSING else default,
                annotation=Annotated[kind, one.metadata["option"](help=text)],
            )

    def made(self, options: Mapping[str, Any]) -> Any:
        own = {one.name: options[one.name] for one in self.fields()}
        utf8(**{name: value for name, value in own.items() if isinstance(value, str)})
        if self.only_given:
            return {name: value for name, value in own.items() if value is not None}
        return self.record(**own)

    def _common_default(self, one: dataclasses.Field[Any]) -> Any:
        """The default if every preset leaves it alone, else None."""
        presets = getattr(self.record, "presets", {}).values()
        values = {p.get(one.name, one.default) for p in presets}
        return one.default if values <= {one.default} else None


def given(record: type[Any]) -> Options:
    """The options of a record of which only those that are typed count."""
    return Options(record, only_given=True)


def takes(*sources: type[Any] | Options) -> Callable[[Command], Command]:
    """The command, called with a record (or a dict) for each source, as typer can read it."""
    all_of = [one if isinstance(one, Options) else Options(one) for one in sources]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def call(**options: Any) -> Any:
            return command(*(one.made(options) for one in all_of))

        parameters = [p for one in all_of for p in one.parameters()]
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def _with_default(text: str, default: Any) -> str:
    """The help with its default marked: behind the word itself, or at the end."""
    if default is None or default is MISSING or isinstance(default, bool) or default == "":
        return text
    word = f"{default:g}" if isinstance(default, float) else str(default)
    marked = rf"\b{re.escape(word)}\b(?![-\w])"
    for ending, said in ((r" \(", " (default; "), ("", " (default)")):
        if isinstance(default, str) and re.search(marked + ending, text):
            return re.sub(marked + ending, word + said, text, count=1)
    if text.endswith(")"):
        return f"{text[:-1]}; default {word})"
    return f"{text} (default {word})"
