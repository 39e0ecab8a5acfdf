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
>>> [option.text for option in given(Brewing).options()]
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
from pathlib import Path
from typing import Annotated, Any, Optional, get_args, get_origin, get_type_hints

from noshuffle.errors import InvalidInput, utf8


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
    return _field(default, text=text, names=names, heading=heading, check=check)


def argument(text: str, default: Any = ...) -> Any:
    """A field that is an argument of the command, without a flag."""
    return _field(default, text=text, is_argument=True)


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
        if "text" in one.metadata:
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


#: What the help calls a value of this type.
_METAVARS: dict[Any, str] = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH", bool: ""}


@dataclass(frozen=True, kw_only=True)
class CommandOption:
    """An option of a command, or an argument, as a field of a record says it."""

    name: str
    kind: Any
    default: Any
    text: str
    names: tuple[str, ...] = ()
    heading: str | None = None
    is_argument: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def is_switch(self) -> bool:
        """Whether it can be switched off by --no-… too: true or false, with no flag of its own."""
        return bool in (get_args(self.kind) or (self.kind,)) and not self.names

    @property
    def flags(self) -> tuple[str, ...]:
        dashed = self.name.replace("_", "-")
        off = (f"--no-{dashed}",) if self.is_switch else ()
        return self.names or (f"--{dashed}", *off)

    @property
    def metavar(self) -> str:
        """What stands for its value in the help."""
        if self.is_argument:
            return self.name.upper()
        kinds = [kind for kind in (get_args(self.kind) or (self.kind,)) if kind in _METAVARS]
        lists = [each for each in get_args(self.kind) if get_origin(each) is list]
        return _METAVARS[(kinds or get_args((lists or [self.kind])[0]))[0]]

    def parameter(self) -> inspect.Parameter:
        """What typer reads."""
        import typer

        made = typer.Argument() if self.is_argument else typer.Option(*self.names)
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if self.is_required else self.default,
            annotation=Annotated[self.kind, made],
        )


@dataclass(frozen=True)
class Options:
    """The options of one record; `only_given` makes them optional and hands over a dict."""

    record: type[Any]
    only_given: bool = False

    def fields(self) -> Iterator[dataclasses.Field[Any]]:
        return (f for f in dataclasses.fields(self.record) if "text" in f.metadata)

    def options(self) -> Iterator[CommandOption]:
        """One for each field."""
        kinds = get_type_hints(self.record)
        for one in self.fields():
            kind, default = kinds[one.name], one.default
            text = _with_default(one.metadata["text"], self._common_default(one))
            if self.only_given:
                kind, default = Optional[kind], None  # noqa: UP045  (kind is known at run time)
            rest = {k: v for k, v in one.metadata.items() if k not in ("text", "check")}
            yield CommandOption(name=one.name, kind=kind, default=default, text=text, **rest)

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


class Command:
    """A command and the records that it is called with, made of the options that were typed.

    typer reads signature and annotations, which are made when it does: the help needs neither.
    """

    def __init__(self, call: Callable[..., Any], sources: tuple[Options, ...]) -> None:
        self.call, self.sources = call, sources
        self.__name__, self.__doc__ = call.__name__, call.__doc__

    def __call__(self, **options: Any) -> Any:
        return self.call(*(one.made(options) for one in self.sources))

    def options(self) -> list[CommandOption]:
        return [option for one in self.sources for option in one.options()]

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.Signature([one.parameter() for one in self.options()])

    @property
    def __annotations__(self) -> dict[str, Any]:  # type: ignore[override]
        return {p.name: p.annotation for p in self.__signature__.parameters.values()}


def takes(*sources: type[Any] | Options) -> Callable[[Callable[..., Any]], Command]:
    """The command that is called with a record (or a dict) for each source."""
    all_of = tuple(one if isinstance(one, Options) else Options(one) for one in sources)
    return lambda call: Command(call, all_of)


def _with_default(text: str, default: Any) -> str:
    """The help with its default marked: behind the word itself, or at the end."""
    if default is None or default is MISSING or isinstance(default, bool) or default == "":
        return text
    word = f"{default:g}" if isinstance(default, float) else str(default)
    marked = rf"\b{re.escape(word)}\b(?![-\w])"
    for ending, said in ((r" \(", " (default; "), ("", " (default)")):
        if isinstance(default, str) and re.search(marked + ending, text):
            return re.sub(marked + ending, word + said, text, count=1)
    if re.search(r"\([^()\[]*\)$", text):  # not an interval, [0, 1)
        return f"{text[:-1]}; default {word})"
    return f"{text} (default {word})"
