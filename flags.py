"""Dataclasses as strict command-line flags: a field is a flag, its metadata the help and the
limits.

    @dataclass
    class Config:
        tau: int = option(16, "inner steps per round", low=1)      # --tau 8

Numbers must be finite and at least `low` (0 if not said), above `above`, below `below`. Booleans
are --name and --no-name. A flag may belong to several dataclasses, each with a default of its own.
Whatever is wrong raises UserError, whose text is the one line that the user sees.
"""

import argparse
import dataclasses
import math
from dataclasses import field


class UserError(Exception):
    """Wrong input. Its text is the one line that the user sees;
    the process then exits with code 2."""


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError instead of printing
    its usage, and does not guess at shortened flags."""

    def __init__(self, **options):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


def option(default, help, **limits):
    return field(default=default, metadata={"help": help} | limits)


def parse(argv: list, owners: dict, groups: dict, **texts) -> dict:
    """The flags given in argv, checked: name -> value. owners: method name or None (all methods) ->
    list of dataclasses; groups: a flag's name -> title of the --help group that begins with it."""
    fields = {}  # flag -> [(owner, field)]
    for owner, classes in owners.items():
        for config_class in classes:
            for f in dataclasses.fields(config_class):
                fields.setdefault(f.name, []).append((owner, f))
    parser = Parser(**texts)
    for name, owned in fields.items():
        if name in groups:
            group = parser.add_argument_group(groups[name])
        add_flag(group, name, owned)
    given = {k: v for k, v in vars(parser.parse_args(argv)).items() if v is not None}
    for name, value in given.items():
        check_limits(name, value, fields[name][0][1].metadata)
    return given


def add_flag(group, name, owned):
    f = owned[0][1]
    defaults = {owner: field.default for owner, field in owned}
    if len(set(defaults.values())) == 1:
        default = f.default
    else:
        default = ", ".join(f"{owner}: {value}" for owner, value in defaults.items())
    help = f.metadata["help"] + (f" (default: {default})" if default != "" else "")
    if isinstance(f.default, bool):
        group.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, default=None, help=help
        )
    else:
        choices = f.metadata.get("choices")
        metavar = "|".join(choices) if choices else type(f.default).__name__.upper()
        group.add_argument(
            f"--{name}", type=type(f.default), choices=choices, metavar=metavar, help=help
        )


def check_limits(name, value, limits):
    if isinstance(value, (str, bool)):
        return
    low, below = limits.get("low", 0), limits.get("below", math.inf)
    above = limits.get("above", -math.inf)
    if not (low <= value < below and value > above):  # also refuses NaN and infinity
        bound = f"above {above}" if above >= low else f"at least {low}"
        raise UserError(
            f"--{name} {value}: must be {bound} and "
            f"{f'below {below}' if below < math.inf else 'finite'}"
        )


def check_saved(values: dict, owners: dict) -> dict:
    """Those of a file's values that are flags, checked
    as if they had been given. Raises UserError."""
    classes = [config_class for some in owners.values() for config_class in some]
    fields = {f.name: f for config_class in classes for f in dataclasses.fields(config_class)}
    known = {name: value for name, value in values.items() if name in fields}
    for name, value in known.items():
        choices = fields[name].metadata.get("choices", [value])
        if type(value) is not type(fields[name].default) or value not in choices:
            raise UserError(
                f"--{name}: the checkpoint says {value!r}, which cannot be; it is damaged"
            )
        check_limits(name, value, fields[name].metadata)
    return known


def fill(config_class, given: dict):
    """The dataclass with what was given, and defaults for the rest."""
    names = [f.name for f in dataclasses.fields(config_class)]
    return config_class(**{name: given[name] for name in names if name in given})
