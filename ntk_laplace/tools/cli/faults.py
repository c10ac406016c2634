"""What is wrong with options of a command beside each other, before anything is loaded."""

from __future__ import annotations

import argparse
import inspect

from ntk_laplace.tools.cli.arrays import ARRAYS
from ntk_laplace.tools.cli.files import is_estimator
from ntk_laplace.tools.cli.likelihood import given_options, likelihood_choices
from ntk_laplace.tools.cli.tables import TABLES, is_table

_NEEDED = ("checkpoint", "data", "likelihood")  # with a Python file
_OF_A_FILE = (  # what a model.joblib has itself
    *_NEEDED, "target", "targets", "source", "noise", "likelihood_option", "precision", "groups",
    "curvature", "float32", "device", "structure", "held_out", "retrain", "classes", "features",
)


def fault_of(options: argparse.Namespace) -> str:
    """What is wrong with the options; empty if nothing is."""
    if options.command == "demo":
        return ""
    if options.command == "fit":
        return _target_fault(options)
    fault = _network_fault(options)
    if not fault and getattr(options, "inputs", options) is None:
        fault = "the following arguments are required: --inputs"
    return fault if fault or is_estimator(options.network[0]) else _likelihood_fault(options) or _target_fault(options)


def _network_fault(options: argparse.Namespace) -> str:
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


def _likelihood_fault(options: argparse.Namespace) -> str:
    path, name = options.likelihood
    if path is not None:
        return ""
    takes = list(inspect.signature(likelihood_choices()[name]).parameters)
    wrong = [option for option in given_options(options) if option not in takes]
    among = f"one of {', '.join(takes)}" if takes else "none"
    return f"expected options of --likelihood {name}: {among}; got {wrong[0]}." if wrong else ""


def _target_fault(options: argparse.Namespace) -> str:
    """The page of explanations shows ``--target`` for any file."""
    files = [options.data, getattr(options, "inputs", None), getattr(options, "held_out", None)]
    if options.target is None or options.command == "explain" or any(map(is_table, filter(None, files))):
        return ""
    if not options.data.is_dir() and options.data.suffix not in ARRAYS:
        return ""  # no file of arrays either: the error that names the format tells how to convert it
    return (f"expected --target with a table, {TABLES}; got {options.data}. The targets of arrays are y, or --targets; "
            "those of a folder are the names in it.")
