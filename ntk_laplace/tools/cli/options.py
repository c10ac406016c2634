"""Option types of the commands; each value is checked before anything is loaded."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from ntk_laplace.tools.cli.likelihood import add_likelihood_options, positive
from ntk_laplace.tools.cli.tables import TABLES, is_table

FACTORY = "make_network"
TARGET: dict[str, Any] = {  # of the option --target
    "action": "append", "metavar": "COLUMN",
    "help": "the column of the targets in a table; all other columns are inputs; repeat it for several targets",
}
DROP: dict[str, Any] = {  # of the option --drop
    "action": "append", "metavar": "COLUMN",
    "help": "a column of a table that is no input, such as the number of the row; repeat it for several",
}
GROUP: dict[str, Any] = {  # of the option --group; dest, because `group` is that of the processes
    "dest": "source", "metavar": "COLUMN",
    "help": "the column, or the array, that names the source of each training example, such as its file, annotator or "
    "month; it is no input; explanations show what changes without each source",
}
SKIP_UNKNOWN: dict[str, Any] = {  # of the option --skip-unknown
    "action": "store_true",
    "help": "with a model.joblib, make no predictions of rows with a category that the training data do not have, or "
    "without a value in a column where these have all; how many is told (default: refuse the table)",
}

_NEEDED = ("checkpoint", "data", "likelihood")  # with a Python file
_OF_A_FILE = (  # what a model.joblib has itself
    *_NEEDED, "target", "targets", "source", "noise", "likelihood_option", "precision", "groups",
    "curvature", "float32", "device", "structure", "held_out", "retrain", "classes", "features",
)


def add_model_options(parser: argparse.ArgumentParser, estimators: bool = True) -> None:
    """Add the options for network, data, likelihood and prior, which several commands share.

    Parameters
    ----------
    parser : ArgumentParser
    estimators : bool
        Whether the command takes a model.joblib in place of a Python file.
    """
    parser.set_defaults(default_of=parser.get_default, estimators=estimators, classes_of=None)
    or_model = "; or a model.joblib that fit wrote, a pickle, which can run code: load only your own"
    parser.add_argument("network", type=source, metavar="FILE.py[:FACTORY]" + "|model.joblib" * estimators,
                        help=f"a Python file and the function in it that returns the nn.Module (default: {FACTORY}); "
                        f"the file is run{or_model * estimators}")
    if estimators:
        parser.add_argument("--network", type=Path, dest="classes_of", metavar="FILE.py",
                            help="the file that fit took as --network, for a model.joblib; the file is run")
    model = parser.add_argument_group("the model", "A Python file needs --checkpoint, --data and --likelihood." +
                                      " A model.joblib has all of these." * estimators)
    model.add_argument("--checkpoint", type=Path, metavar="PT",
                       help="the trained weights, saved with torch.save(network.state_dict(), PT), or .safetensors")
    model.add_argument("--data", type=Path, metavar="FILE",
                       help="the training data: saved with numpy.savez(FILE.npz, X=..., y=...) or torch.save((X, y), "
                       f"FILE.pt), a table ({TABLES}), or a folder with one folder of images for each class")
    model.add_argument("--target", **TARGET)
    model.add_argument("--group", **GROUP)
    model.add_argument("--drop", **DROP)
    model.add_argument("--output", type=output, metavar="NAME",
                       help="which of the outputs, by name or position, if the network returns several; with a "
                       "model.joblib of explain, the target or the class to explain")
    model.add_argument("--targets", metavar="NAME",
                       help="the array of the targets, if the others are the network's inputs by name, saved with "
                       "numpy.savez(NPZ, input_ids=..., labels=...)")
    add_likelihood_options(parser)
    model.add_argument("--precision", type=positive, default=1.0, metavar="DELTA",
                       help="of the prior: the weight decay on the summed loss (default: 1)")
    model.add_argument("--groups", choices=("all", "layer", "tensor", "input"), default="all",
                       help="parameters that share one precision (default: %(default)s)")
    model.add_argument("--curvature", choices=("ggn", "ef", "mc"), default="ggn",
                       help="exact Gauss-Newton, empirical or Monte-Carlo Fisher (default: %(default)s)")
    work = parser.add_argument_group("the work")
    work.add_argument("--float32", action="store_true",
                      help="single precision for network and algebra: half the memory, six digits "
                      "(default: double, in any case)")
    work.add_argument("--device", default="cpu", help="as torch names it, such as cuda (default: %(default)s)")
    work.add_argument("--memory", type=positive, metavar="GIB",
                      help="refuse what would take more (default: the device's free memory)")


def is_estimator(path: Path) -> bool:
    """Whether the name is that of an estimator's file."""
    return path.suffix.lower() == ".joblib"


def network_fault(options: argparse.Namespace) -> str:
    """What is wrong with the options of the network; empty if nothing is."""
    path = options.network[0]
    if not is_estimator(path):
        missing = [f"--{name}" for name in _NEEDED if getattr(options, name) is None]
        if missing and path.suffix != ".py":
            wanted = "a model.joblib that fit wrote, or " * options.estimators + "FILE.py[:FACTORY]"
            remedy = ""
            if hasattr(options, "inputs") and is_table(path):
                remedy = f" Name the model first, and {path} with --inputs."
            elif options.estimators and (path / "model.joblib").is_file():
                remedy = f" Pass {path / 'model.joblib'}."
            return f"expected {wanted} with {', '.join(f'--{name}' for name in _NEEDED)}; got {path}.{remedy}"
        if missing:
            other = "; a model.joblib that fit wrote has these" * options.estimators
            return f"the following arguments are required: {', '.join(missing)}{other}"
        alone = {"--network": options.classes_of, "--skip-unknown": getattr(options, "skip_unknown", None)}
        wrong = next((option for option, given in alone.items() if given), None)
        return f"expected {wrong} with a model.joblib alone; got it with a Python file." if wrong else ""
    if not options.estimators:
        return f"expected FILE.py[:FACTORY] for {options.command}; got {path}. Pass the network's Python file."
    others = {"memory": ["evidence"], "output": ["explain"], "drop": ["explain", "predict"]}  # commands with them
    own = (*_OF_A_FILE, *(name for name, commands in others.items() if options.command not in commands))
    given = [name for name in own if getattr(options, name, None) != options.default_of(name)]
    if given:
        option = "--group" if given[0] == "source" else f"--{given[0].replace('_', '-')}"
        return f"expected a Python file for {option}; got {path}, which has its own. Leave {option} out."
    return ""


def source(text: str) -> tuple[Path, str]:
    """``FILE.py`` or ``FILE.py:FACTORY``, as path and name."""
    file, colon, name = text.rpartition(":")
    if not colon or text.endswith((".py", ".joblib")):  # a colon of C:\model.py
        file, name = text, FACTORY
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected FILE.py:FACTORY with the name of a function; got {text!r}.")
    return Path(file).expanduser(), name


def output(text: str) -> str | int:
    """A name, or a position."""
    return int(text) if text.isdecimal() else text


def structures(text: str) -> list[str]:
    """Comma-separated names of structures; the network's file may register more, so they are looked up later."""
    names = [name.strip() for name in text.split(",")]
    if "" in names or len(set(names)) < len(names):
        got = f"one twice in {text!r}" if "" not in names else repr(text)
        raise argparse.ArgumentTypeError(f"expected names of structures such as gp,kfac; got {got}.")
    return names


def seed(text: str) -> int:
    """An integer random seed."""
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**31 - 1}; got {text!r}.")
    return int(text)


def names(text: str) -> list[str]:
    """Comma-separated names."""
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected names with commas between; got {text!r}.")
    return found


def image_shape(text: str) -> tuple[int, ...]:
    """``HEIGHTxWIDTH`` or ``HEIGHTxWIDTHx3``."""
    sides = text.lower().split("x")
    whole = all(side.isdecimal() and int(side) for side in sides)
    if len(sides) not in (2, 3) or not whole or sides[2:] not in ([], ["3"]):
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH, such as 28x28, or 32x32x3; got {text!r}.")
    return tuple(int(side) for side in sides)


def count(text: str) -> int:
    """An integer of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}.")
    return int(text)


def widths(text: str) -> tuple[int, ...]:
    """Comma-separated integers of at least 1."""
    return tuple(count(part.strip()) for part in text.split(","))


def level(text: str) -> float:
    """A probability strictly between 0 and 1."""
    return positive(text, 1.0, "a probability between 0 and 1, such as 0.9")


def directory(text: str) -> Path:
    """A directory, or a path where one can be created."""
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a directory; got the file {text!r}. Choose another name.")
    return path


def _file(ending: str, text: str) -> Path:
    """Path of a file whose name has this ending."""
    if not text.lower().endswith(ending):
        raise argparse.ArgumentTypeError(f"expected a file name that ends with {ending}; got {text!r}.")
    return Path(text).expanduser()


csv_file, html_file, png_file = (partial(_file, ending) for ending in (".csv", ".html", ".png"))
