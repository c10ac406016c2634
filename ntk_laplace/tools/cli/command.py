"""The command's argument parser and error handling."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import ntk_laplace as ntkl
from ntk_laplace.errors import first_line
from ntk_laplace.runtime.distributed import process_group
from ntk_laplace.runtime.resources import is_about_memory
from ntk_laplace.structures import structure_names
from ntk_laplace.tools.cli.arrays import ARRAYS
from ntk_laplace.tools.cli.likelihood import likelihood_fault
from ntk_laplace.tools.cli.options import (
    DROP,
    FACTORY,
    GROUP,
    SKIP_UNKNOWN,
    TARGET,
    add_model_options,
    count,
    csv_file,
    directory,
    html_file,
    image_shape,
    is_estimator,
    level,
    names,
    network_fault,
    png_file,
    seed,
    source,
    structures,
    widths,
)
from ntk_laplace.tools.cli.tables import TABLES, is_table

OK, FAILED, INTERRUPTED = 0, 1, 130  # 2, wrong usage, is that of argparse


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        The arguments of the process by default.

    Returns
    -------
    int
        Exit code: 0 for success, 1 for an error, 130 if interrupted. Wrong usage exits with 2.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return OK
    if options.command != "demo":
        fault = _target_fault(options) if options.command == "fit" else _model_fault(options)
        if fault:
            parser.error(fault)
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python fails when it flushes at the end
        return _complain("its output was closed before the end, as by head; files that come after it were not written. "
                         "Send the output to a file.", FAILED)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ntk-laplace", description="A trained network as a Gaussian process: evidence, predictions, explanations."
    )
    parser.add_argument("--version", action="version", version=f"ntk-laplace {ntkl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    demo = commands.add_parser(
        "demo",
        help="see a network become a GP, on data that scikit-learn ships",
        description="Train three networks, turn each into a Gaussian process, compute its evidence in function space "
        "and in weight space, evaluate it on held-out data, and write summary.json, pictures and report.html. "
        "Takes about a minute on two cores and downloads nothing.",
    )
    demo.add_argument("--out", type=directory, default=Path("ntk-laplace-demo"), metavar="DIR",
                      help="directory for the files, made if missing (default: %(default)s)")
    demo.add_argument("--seed", type=seed, default=0, metavar="S",
                      help="a whole number; decides splits and initial weights (default: %(default)s)")
    demo.add_argument("--small", action="store_true", help="a few examples of each problem: seconds, rougher numbers")
    fit = commands.add_parser(
        "fit",
        help="train a network on a table or images, and see what its uncertainty is worth",
        description="Train a small network on a random 80 % of the rows, with precisions and noise that the evidence "
        "chooses, and score it and its posterior on the others. Writes predictions.csv for those, explanations.html, a "
        "page that explains them, and model.joblib, the estimator, which predict, explain and evidence take.",
    )
    fit.add_argument("data", type=Path, metavar="DATA",
                     help=f"a table ({TABLES}), a folder with one folder of images for each class, or arrays X and y, "
                     ".npz or .pt")
    fit.add_argument("--target", **TARGET)
    fit.add_argument("--group", **GROUP)
    fit.add_argument("--drop", **DROP)
    fit.add_argument("--category", action="append", metavar="COLUMN",
                     help="a column of a table whose numbers are names, such as codes; columns of text are so anyway; "
                     "repeat it for several")
    fit.add_argument("--fill-missing", action="store_true",
                     help="fill missing inputs with the mean of their column, and mark them in one more column")
    fit.add_argument("--task", choices=("regression", "classes"),
                     help="what the target is (default: names and few whole numbers are classes)")
    fit.add_argument("--network", type=source, metavar="FILE.py[:FACTORY]",
                     help=f"a Python file and the function in it that returns the nn.Module to train (default: "
                     f"{FACTORY}); the file is run")
    fit.add_argument("--hidden", type=widths, metavar="A,B,...",
                     help="units of the hidden layers (default: 32,32, or 32 for classes), or channels of the "
                     "convolutions (default: 8,16)")
    fit.add_argument("--level", type=level, default=0.9, metavar="Q",
                     help="of the intervals or sets: the fraction to be covered (default: %(default)s)")
    fit.add_argument("--epochs", type=count, metavar="N", help="of the training (default: 300, or 100 for classes)")
    fit.add_argument("--predictive", choices=("loo", "folds"), default="loo",
                     help="what sets the size of the uncertainty: the training rows, each predicted from all others in "
                     "closed form; or folds of them, which cost five more trainings and give better densities, "
                     "those of regressions above all (default: %(default)s)")
    fit.add_argument("--seed", type=seed, default=0, metavar="S",
                     help="decides held-out rows and initial weights (default: %(default)s)")
    fit.add_argument("--out", type=directory, default=Path("ntk-laplace-fit"), metavar="DIR",
                     help="directory for the files, made if missing (default: %(default)s)")
    evidence = commands.add_parser(
        "evidence",
        help="the evidence of a network under several structures",
        description="Print the log marginal likelihood of a trained network on its training data, exact and "
        "approximated, with the time and memory of each structure. What does not fit into memory gets a note, "
        "and the others continue. The network is put in evaluation mode. Several processes share the work: "
        "torchrun --nproc-per-node 2 -m ntk_laplace evidence ...",
    )
    add_model_options(evidence)
    evidence.add_argument("--structures", type=structures, metavar="A,B,...",
                          help=f"which ones (default: all, {','.join(structure_names())} and those that the network's "
                          "file registers)")
    evidence.add_argument("--correction", action="store_true",
                          help="add half gᵀH⁻¹g, for weights that are not at their optimum")
    evidence.add_argument("--json", type=Path, metavar="OUT", help="write all digits to this file")
    evidence.add_argument("--plot", type=png_file, metavar="OUT.png", help="draw the table into this file")
    plan = commands.add_parser(
        "plan",
        help="the memory and the time that each structure would take",
        description="Print a forecast for each structure, from the rows of a few examples and a probe of this device, "
        "before anything large is allocated: memory, whether it fits, and time, on this device and on several.",
    )
    add_model_options(plan, estimators=False)
    plan.add_argument("--structures", type=structures, metavar="A,B,...", help="which ones (default: all)")
    plan.add_argument("--processes", type=count, default=1, metavar="K",
                      help="devices like this one that would share the fit (default: %(default)s)")
    plan.add_argument("--json", type=Path, metavar="OUT", help="write all digits to this file")
    explain = commands.add_parser(
        "explain",
        help="a page that explains predictions by training points",
        description="Write one HTML page, which a browser opens from disk: each prediction with its uncertainty, the "
        "training points for and against it, the prediction without them, and the training set with each point "
        "predicted from the others. By default exact, in function space, whose memory grows with the square of "
        "examples times outputs; other structures take more data, and the page states what is exact.",
    )
    add_model_options(explain)
    explain.add_argument("--structure", default="gp", metavar="A",
                         help=f"one of {', '.join(structure_names())}, or one that the network's file registers "
                         "(default: %(default)s)")
    shown = explain.add_argument_group("the page")
    shown.add_argument("--inputs", type=Path, metavar="FILE",
                       help="inputs to explain, in a file or folder like that of --data; targets may be absent")
    shown.add_argument("--skip-unknown", **SKIP_UNKNOWN)
    shown.add_argument("--out", type=html_file, default=Path("explanations.html"), metavar="OUT.html",
                       help="the page (default: %(default)s)")
    shown.add_argument("--most", type=count, default=500, metavar="N",
                       help="explain at most the first N inputs (default: %(default)s)")
    shown.add_argument("--k", type=count, default=6, metavar="K",
                       help="training points for and against each prediction (default: %(default)s)")
    shown.add_argument("--candidates", type=count, default=0, metavar="N",
                       help="rank the N strongest training points of each input again, by what the network itself does "
                       "without them: a network is moved for each (default: no second ranking)")
    shown.add_argument("--shape", type=image_shape, metavar="HxW", help="inputs are images of this height and width")
    shown.add_argument("--classes", type=names, metavar="A,B,...", help="names of the classes or outputs")
    shown.add_argument("--features", type=names, metavar="A,B,...", help="names of the inputs' columns")
    shown.add_argument("--title", default="Which training points made these predictions?", help="of the page")
    predict = commands.add_parser(
        "predict",
        help="predictions of new inputs, each with its uncertainty",
        description="Write a table with one row per input, in their order: the prediction, its uncertainty in two "
        "parts, and an interval, or a set of labels, of the level. Beside it a page shows whether the uncertainty is "
        "right. Scale, temperature and noise are fitted to the training points, each predicted from all others, "
        "without a validation set; or to held-out data, which every structure can use. A model.joblib is fitted "
        "already: its table is that of fit, without a page.",
    )
    add_model_options(predict)
    predict.add_argument("--structure", default="auto", metavar="A",
                         help=f"one of {', '.join(structure_names())}, or one that the network's file registers "
                         "(default: the cheaper of the exact ones, gp and full)")
    told = predict.add_argument_group("the predictions")
    told.add_argument("--inputs", type=Path, metavar="FILE",
                      help="inputs to predict, in a file or folder like that of --data; targets, which may be absent, "
                      "are scored")
    told.add_argument("--skip-unknown", **SKIP_UNKNOWN)
    told.add_argument("--out", type=csv_file, default=Path("predictions.csv"), metavar="OUT.csv",
                      help="the table; the page beside it ends with .html (default: %(default)s)")
    told.add_argument("--level", type=level, default=0.9, metavar="Q",
                      help="of the intervals or sets: the fraction to be covered (default: %(default)s)")
    told.add_argument("--held-out", type=Path, metavar="FILE",
                      help="data that training did not use, for calibration, intervals and sets in place of "
                      "leave-one-out; needed for a structure that is not exact")
    told.add_argument("--retrain", action="store_true",
                      help="train a copy of the network on first, at precisions and noise that the evidence chooses: "
                      "for weights trained with little weight decay")
    told.add_argument("--classes", type=names, metavar="A,B,...", help="names of the classes or outputs")
    return parser


def _model_fault(options: argparse.Namespace) -> str:
    """What is wrong with the options of a model; empty if nothing is."""
    fault = network_fault(options)
    if not fault and getattr(options, "inputs", options) is None:
        fault = "the following arguments are required: --inputs"
    return fault if fault or is_estimator(options.network[0]) else likelihood_fault(options) or _target_fault(options)


def _target_fault(options: argparse.Namespace) -> str:
    """What is wrong with ``--target``; empty if nothing is. The page of explanations shows it for any file."""
    files = [options.data, getattr(options, "inputs", None), getattr(options, "held_out", None)]
    if options.target is None or options.command == "explain" or any(map(is_table, filter(None, files))):
        return ""
    if not options.data.is_dir() and options.data.suffix not in ARRAYS:
        return ""  # no file of arrays either: the error that names the format tells how to convert it
    return (f"expected --target with a table, {TABLES}; got {options.data}. The targets of arrays are y, or --targets; "
            "those of a folder are the names in it.")


def _run(options: argparse.Namespace) -> int:
    """Run a command; errors become one line."""
    demo = options.command == "demo"
    try:
        (_demo if demo else _own)(options)
    except KeyboardInterrupt:
        left = "files of an earlier run are as they were" if demo else "no file was written"
        return _complain(f"interrupted; {left}", INTERRUPTED)
    except ntkl.NTKLaplaceError as cause:
        return _complain(str(cause), FAILED)
    except BrokenPipeError:
        raise
    except OSError as cause:
        path, other = (options.out, "--out") if demo else (cause.filename, "name")
        return _complain(f"cannot write to {path}: {cause.strerror or cause}. Choose another {other}.", FAILED)
    except (MemoryError, RuntimeError) as cause:
        if not is_about_memory(cause):
            raise
        return _complain(f"expected more memory; got {type(cause).__name__}: {first_line(cause)}. "
                         "Take fewer examples, or a smaller network.", FAILED)
    return OK


def _demo(options: argparse.Namespace) -> None:
    from ntk_laplace.tools.demo import run_demo  # here: its imports are slow, and --help does not need them

    run_demo(options.out, options.seed, small=options.small)


def _own(options: argparse.Namespace) -> None:
    """Run a command on the user's network, in one process or in those that torchrun started."""
    from ntk_laplace.tools.cli import evidence, explain, fit, plan, predict  # here, as the demo's

    with process_group() as options.group, _warnings_in_words():
        if options.group is not None and options.group.size() > 1 and options.command != "evidence":
            raise ntkl.UnsupportedError(f"one process for {options.command}", f"{options.group.size()}",
                                        "Start it without torchrun; evidence takes several.")
        runs = {"evidence": evidence, "explain": explain, "fit": fit, "plan": plan, "predict": predict}
        runs[options.command].run(options)


@contextlib.contextmanager
def _warnings_in_words() -> Iterator[None]:
    """Warnings of the library in one line each, without a place in its code."""
    with warnings.catch_warnings():  # it restores what shows them
        others = warnings.showwarning

        def shown(
            message: Warning | str, category: type[Warning], filename: str, lineno: int, file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, ntkl.NTKLaplaceWarning):
                print(f"ntk-laplace: warning: {message}", file=sys.stderr)
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = shown
        yield


def _complain(message: str, code: int) -> int:
    process = os.environ.get("RANK", "0")
    print(f"ntk-laplace{f' (process {process})' if process != '0' else ''}: {message}", file=sys.stderr)
    return code
