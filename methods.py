"""All methods under their names: here --method NAME finds its two versions.

    python train.py --method edit       # the sharded version: several ranks
    python -m plain --method edit       # the plain version: one process, as the equations read

train.py, python -m plain, lab.sweep, --help and the tests take methods from this table and from
nowhere else. A module is imported when its method is asked for, so the plain versions run where
ranks cannot, as on Windows. To add a method, write its file and its row. Both classes have one
name. A method whose third column is "" has no plain version: it trains sharded only.
"""

from collections.abc import Mapping
from importlib import import_module

from config import UserError

# fmt: off
TABLE = {
    # --method          class              sharded: module               plain: module
    "minibatch":        ("MiniBatch",       "minibatch",                  "plain.minibatch"),
    "diloco":           ("DiLoCo",          "diloco",                     "plain.diloco"),
    "edit":             ("EDiT",            "edit",                       "plain.edit"),
    "a_edit":           ("AEDiT",           "a_edit",                     "plain.a_edit"),

    "post_local_sgd":   ("PostLocalSGD",    "relatives.post_local_sgd",   "plain.local"),
    "qsr":              ("QSR",             "relatives.qsr",              "plain.local"),
    "slowmo":           ("SlowMo",          "relatives.slowmo",           "plain.local"),
    "streaming_diloco": ("StreamingDiLoCo", "relatives.streaming_diloco", "plain.streaming"),
    "co2":              ("CO2",             "relatives.co2",              "plain.local"),
    "noloco":           ("NoLoCo",          "relatives.noloco",           "plain.local"),
    "streaming_edit":   ("StreamingEDiT",   "relatives.streaming_edit",   "plain.streaming"),
    "zero_one_adam":    ("ZeroOneAdam",     "relatives.zero_one_adam",    "plain.one_bit"),
    "one_bit_edit":     ("OneBitEDiT",      "relatives.one_bit_edit",     "plain.one_bit"),
    "sparse_loco":      ("SparseLoCo",      "relatives.sparse_loco",      "plain.sparse"),
    "top_k":            ("TopK",            "relatives.top_k",            "plain.sparse"),
    "eager":            ("Eager",           "relatives.eager",            "plain.local"),
    "robust":           ("Robust",          "relatives.robust",           "plain.local"),
}
# fmt: on


class Versions(Mapping):
    """name -> class, of the methods that have a module in this column of the table. Only looking up
    a class imports its module; a loop over the names imports nothing."""

    def __init__(self, column: int):
        self.column = column

    def names(self) -> list:
        return [name for name, row in TABLE.items() if row[self.column]]

    def __iter__(self):
        return iter(self.names())

    def __len__(self):
        return len(self.names())

    def __contains__(self, name):  # Mapping's own one would import the module
        return name in self.names()

    def __getitem__(self, name: str):
        if name not in self:
            raise KeyError(name)
        class_name = TABLE[name][0]
        module = TABLE[name][self.column]
        try:
            found = import_module(module)
        except ModuleNotFoundError as error:
            if error.name != module:  # of a package that the method needs
                raise
            raise UserError(f"methods.py: --method {name}: there is no module {module}") from None
        if not hasattr(found, class_name):
            raise UserError(f"methods.py: --method {name}: {module} has no class {class_name}")
        return getattr(found, class_name)

    def file(self, name: str) -> str:
        """The file of a method's version, as "relatives/qsr.py"."""
        return TABLE[name][self.column].replace(".", "/") + ".py"


METHODS = Versions(1)  # name -> sharded class
PLAIN = Versions(2)  # name -> plain class


def check_plain(name: str):
    """Raise UserError unless the method has a plain version."""
    if name not in PLAIN:
        raise UserError(
            f"--method {name} has no plain version: name one in methods.py, or train it on ranks, "
            "with train.py or without --plain"
        )
    PLAIN[name]  # raises UserError if its row is wrong
