"""Options of the commands: their types, which check each value before anything is loaded, and the parser."""

from __future__ import annotations

import argparse
import ast
import math
from functools import partial
from pathlib import Path
from typing import Any

import ntk_laplace as ntkl
from ntk_laplace.structures import structure_names
from ntk_laplace.tools.cli.likelihood import likelihood_choices
from ntk_laplace.tools.cli.tables import TABLES
from ntk_laplace.tools.estimators.regressor import LIKELIHOODS

_FACTORY = "make_network"

# --- types


def _source(text: str) -> tuple[Path, str]:
    """``FILE.py`` or ``FILE.py:FACTORY``, as path and name."""
    file, colon, name = text.rpartition(":")
    if not colon or text.endswith((".py", ".joblib")):  # a colon of C:\model.py
        file, name = text, _FACTORY
    if not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected FILE.py:FACTORY with the name of a function; got {text!r}.")
    return Path(file).expanduser(), name


def _output(text: str) -> str | int:
    return int(text) if text.isdecimal() else text


def _structures(text: str) -> list[str]:
    """Comma-separated names of structures; the network's file may register more, so they are looked up later."""
    expected = "names of structures such as gp,kfac"
    found = _names(text, expected)
    if len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"expected {expected}; got one twice in {text!r}.")
    return found


def _seed(text: str) -> int:
    if not text.isdecimal() or int(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to {2**31 - 1}; got {text!r}.")
    return int(text)


def _names(text: str, expected: str = "names with commas between") -> list[str]:
    found = [name.strip() for name in text.split(",")]
    if not all(found):
        raise argparse.ArgumentTypeError(f"expected {expected}; got {text!r}.")
    return found


def _image_shape(text: str) -> tuple[int, ...]:
    """``HEIGHTxWIDTH`` or ``HEIGHTxWIDTHx3``."""
    sides = text.lower().split("x")
    whole = all(side.isdecimal() and int(side) for side in sides)
    if len(sides) not in (2, 3) or not whole or sides[2:] not in ([], ["3"]):
        raise argparse.ArgumentTypeError(f"expected HEIGHTxWIDTH, such as 28x28, or 32x32x3; got {text!r}.")
    return tuple(int(side) for side in sides)


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1; got {text!r}.")
    return int(text)


def _widths(text: str) -> tuple[int, ...]:
    return tuple(_count(part.strip()) for part in text.split(","))


def _likelihood(text: str) -> tuple[Path | None, str]:
    """Name of a registered class, or ``FILE.py:CLASS``."""
    file, colon, name = text.rpartition(":")
    if colon and file.endswith(".py") and name.isidentifier():
        return Path(file).expanduser(), name
    if text not in likelihood_choices():
        raise argparse.ArgumentTypeError(f"invalid choice: {text!r} (choose from {', '.join(likelihood_choices())}, "
                                         "or name a class as FILE.py:CLASS)")
    return None, text


def _likelihood_option(text: str) -> tuple[str, Any]:
    """``NAME=VALUE`` as a name and a Python literal; other values are text."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE; got {text!r}.")
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (ValueError, SyntaxError):
        return name.strip(), value.strip()


def _positive(text: str, below: float = math.inf, expected: str = "a positive number") -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < below:
        raise argparse.ArgumentTypeError(f"expected {expected}; got {text!r}.")
    return value


def _level(text: str) -> float:
    return _positive(text, 1.0, "a probability between 0 and 1, such as 0.9")


def _directory(text: str) -> Path:
    """A directory, or a path where one can be created."""
    path = Path(text).expanduser()
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(f"expected a directory; got the file {text!r}. Choose another name.")
    return path


def _file(ending: str, text: str) -> Path:
    if not text.lower().endswith(ending):
        raise argparse.ArgumentTypeError(f"expected a file name that ends with {ending}; got {text!r}.")
    return Path(text).expanduser()


_csv_file, _html_file, _png_file = (partial(_file, ending) for ending in (".csv", ".html", ".png"))

# --- options of several commands


_SHARED: dict[str, dict[str, Any]] = {
    "--target": {
        "action": "append", "metavar": "COLUMN",
        "help": "the column of the targets in a table; all other columns are inputs; repeat it for several targets",
    },
    "--group": {  # dest, because `group` is that of the processes
        "dest": "source", "metavar": "COLUMN",
        "help": "the column, or the array, that names the source of each training example, such as its file, annotator "
        "or month; it is no input; explanations show what changes without each source",
    },
    "--drop": {
        "action": "append", "metavar": "COLUMN",
        "help": "a column of a table that is no input, such as the number of the row; repeat it for several",
    },
    "--inputs": {
        "type": Path, "metavar": "FILE",
        "help": "the inputs, in a file or folder like that of --data; predictions are compared with the targets in it, "
        "which may be absent",
    },
    "--skip-unknown": {
        "action": "store_true",
        "help": "with a model.joblib, make no predictions of rows with a category that the training data do not have, "
        "or without a value in a column where these have all; how many is told (default: refuse the table)",
    },
    "--level": {
        "type": _level, "default": 0.9, "metavar": "Q",
        "help": "of the intervals or sets: the fraction to be covered (default: %(default)s)",
    },
    "--classes": {"type": _names, "metavar": "A,B,...", "help": "names of the classes or outputs"},
    "--structure": {
        "metavar": "A",
        "help": f"one of {', '.join(structure_names())}, one that the network's file registers, or auto, which chooses "
        "among the exact ones (default: %(default)s)",
    },
    "--structures": {
        "type": _structures, "metavar": "A,B,...",
        "help": f"which ones (default: all, {','.join(structure_names())} and those that the network's file registers)",
    },
    "--json": {"type": Path, "metavar": "OUT", "help": "write all digits to this file"},
    "--seed": {
        "type": _seed, "default": 0, "metavar": "S",
        "help": "a whole number; decides held-out rows and initial weights (default: %(default)s)",
    },
    "--out": {
        "type": _directory, "metavar": "DIR", "help": "directory for the files, made if missing (default: %(default)s)",
    },
}


def _add_shared(parser: Any, *names: str, **default: Any) -> None:
    """Add options of several commands to a parser or a group; a default is that of one option alone."""
    for name in names:
        parser.add_argument(name, **_SHARED[name] | default)


def _add_model(parser: argparse.ArgumentParser, estimators: bool = True) -> None:
    """Add the options for network, data, likelihood and prior; `estimators`: or for a model.joblib in their place."""
    parser.set_defaults(default_of=parser.get_default, estimators=estimators, classes_of=None)
    or_model = "; or a model.joblib that fit wrote, a pickle, which can run code: load only your own"
    parser.add_argument("network", type=_source, metavar="FILE.py[:FACTORY]" + "|model.joblib" * estimators,
                        help=f"a Python file and the function in it that returns the nn.Module (default: {_FACTORY}); "
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
    _add_shared(model, "--target", "--group", "--drop")
    model.add_argument("--output", type=_output, metavar="NAME",
                       help="which of the outputs, by name or position, if the network returns several; with a "
                       "model.joblib of explain, the target or the class to explain")
    model.add_argument("--targets", metavar="NAME",
                       help="the array of the targets, if the others are the network's inputs by name, saved with "
                       "numpy.savez(NPZ, input_ids=..., labels=...)")
    group = parser.add_argument_group("the likelihood")
    group.add_argument("--likelihood", type=_likelihood, metavar="NAME",
                       help=f"of the targets y: {', '.join(likelihood_choices())}, or FILE.py:CLASS for your own; the "
                       "file is run")
    group.add_argument("--noise", type=_positive, metavar="VARIANCE",
                       help="of gaussian targets, in squared units of y (default: 1)")
    group.add_argument("--likelihood-option", type=_likelihood_option, action="append", default=[],
                       metavar="NAME=VALUE", help="an argument of the likelihood's class, such as missing=nan or "
                       "\"parametrization=log variance\"; may be repeated")
    model.add_argument("--precision", type=_positive, default=1.0, metavar="DELTA",
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
    work.add_argument("--memory", type=_positive, metavar="GIB",
                      help="refuse what would take more (default: the device's free memory)")


# --- commands


def command_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="ntk-laplace", description="A trained network as a Gaussian process: evidence, predictions, explanations."
    )
    parser.add_argument("--version", action="version", version=f"ntk-laplace {ntkl.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for add in (_add_demo, _add_fit, _add_evidence, _add_plan, _add_explain, _add_predict):
        add(commands)
    return parser


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser(
        "demo",
        help="see a network become a GP, on data that scikit-learn ships",
        description="Train three networks, turn each into a Gaussian process, compute its evidence in function space "
        "and in weight space, evaluate it on held-out data, and write summary.json, pictures and report.html. "
        "Takes about a minute on two cores and downloads nothing.",
    )
    _add_shared(demo, "--out", default=Path("ntk-laplace-demo"))
    _add_shared(demo, "--seed")
    demo.add_argument("--small", action="store_true", help="a few examples of each problem: seconds, rougher numbers")


def _add_fit(commands: Any) -> None:
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
    _add_shared(fit, "--target", "--group", "--drop")
    fit.add_argument("--category", action="append", metavar="COLUMN",
                     help="a column of a table whose numbers are names, such as codes; columns of text are so anyway; "
                     "repeat it for several")
    fit.add_argument("--fill-missing", action="store_true",
                     help="fill missing inputs with the mean of their column, and mark them in one more column")
    fit.add_argument("--exposure", metavar="COLUMN",
                     help="a column of a table that counts are expected in proportion to, such as the time of "
                     "observation of each row; --likelihood is negative-binomial then, or poisson")
    fit.add_argument("--task", choices=("regression", "classes"),
                     help="what the target is (default: names and few whole numbers are classes)")
    fit.add_argument("--network", type=_source, metavar="FILE.py[:FACTORY]",
                     help=f"a Python file and the function in it that returns the nn.Module to train (default: "
                     f"{_FACTORY}); the file is run")
    fit.add_argument("--hidden", type=_widths, metavar="A,B,...",
                     help="units of the hidden layers (default: 32,32, or 32 for classes of at most 5,000 rows), or "
                     "channels of the convolutions (default: 8,16)")
    fit.add_argument("--likelihood", choices=LIKELIHOODS,
                     help="the noise of numbers: normal; with heavy tails, for targets with outliers; or normal with a "
                     "variance that depends on the inputs; auto tries the others where the first leaves outliers, and "
                     "the evidence chooses (default: auto); log-normal, for positive numbers that vary by factors; or "
                     "that of counts, negative-binomial or poisson")
    _add_shared(fit, "--level")
    fit.add_argument("--epochs", type=_count, metavar="N",
                     help="of the training (default: 300, or 100 for classes, and fewer of many rows)")
    fit.add_argument("--predictive", choices=("loo", "folds"), default="loo",
                     help="what sets the size of the uncertainty: the training rows, each predicted from all others in "
                     "closed form; or folds of them, each left out of a whole training of its own, which cost "
                     "five more, and know better where columns are many (default: %(default)s)")
    _add_shared(fit, "--seed")
    _add_shared(fit, "--out", default=Path("ntk-laplace-fit"))


def _add_evidence(commands: Any) -> None:
    evidence = commands.add_parser(
        "evidence",
        help="the evidence of a network under several structures",
        description="Print the log marginal likelihood of a trained network on its training data, exact and "
        "approximated, with the time and memory of each structure. What does not fit into memory gets a note, "
        "and the others continue. The network is put in evaluation mode. Several processes share the work: "
        "torchrun --nproc-per-node 2 -m ntk_laplace evidence ...",
    )
    _add_model(evidence)
    _add_shared(evidence, "--structures")
    evidence.add_argument("--correction", action="store_true",
                          help="add half gᵀH⁻¹g, for weights that are not at their optimum")
    _add_shared(evidence, "--json")
    evidence.add_argument("--plot", type=_png_file, metavar="OUT.png", help="draw the table into this file")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="the memory and the time that each structure would take",
        description="Print a forecast for each structure, from the rows of a few examples and a probe of this device, "
        "before anything large is allocated: memory, whether it fits, and time, on this device and on several.",
    )
    _add_model(plan, estimators=False)
    _add_shared(plan, "--structures")
    plan.add_argument("--processes", type=_count, default=1, metavar="K",
                      help="devices like this one that would share the fit (default: %(default)s)")
    _add_shared(plan, "--json")


def _add_explain(commands: Any) -> None:
    explain = commands.add_parser(
        "explain",
        help="a page that explains predictions by training points",
        description="Write one HTML page, which a browser opens from disk: each prediction with its uncertainty, the "
        "training points for and against it, the prediction without them, and the training set with each point "
        "predicted from the others. By default exact, in function space, whose memory grows with the square of "
        "examples times outputs; other structures take more data, and the page states what is exact.",
    )
    _add_model(explain)
    _add_shared(explain, "--structure", default="gp")
    shown = explain.add_argument_group("the page")
    _add_shared(shown, "--inputs", "--skip-unknown")
    shown.add_argument("--out", type=_html_file, default=Path("explanations.html"), metavar="OUT.html",
                       help="the page (default: %(default)s)")
    shown.add_argument("--most", type=_count, default=500, metavar="N",
                       help="explain at most the first N inputs (default: %(default)s)")
    shown.add_argument("--k", type=_count, default=6, metavar="K",
                       help="training points for and against each prediction (default: %(default)s)")
    shown.add_argument("--candidates", type=_count, default=0, metavar="N",
                       help="rank the N strongest training points of each input again, by what the network itself does "
                       "without them: a network is moved for each (default: no second ranking)")
    shown.add_argument("--shape", type=_image_shape, metavar="HxW", help="inputs are images of this height and width")
    _add_shared(shown, "--classes")
    shown.add_argument("--features", type=_names, metavar="A,B,...", help="names of the inputs' columns")
    shown.add_argument("--title", default="Which training points made these predictions?", help="of the page")


def _add_predict(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="predictions of new inputs, each with its uncertainty",
        description="Write a table with one row per input, in their order: the prediction, its uncertainty in two "
        "parts, and an interval, or a set of labels, of the level. Beside it a page shows whether the uncertainty is "
        "right. Scale, temperature and noise are fitted to the training points, each predicted from all others, "
        "without a validation set; or to held-out data, which every structure can use. A model.joblib is fitted "
        "already: its table is that of fit, without a page.",
    )
    _add_model(predict)
    _add_shared(predict, "--structure", default="auto")
    told = predict.add_argument_group("the predictions")
    _add_shared(told, "--inputs", "--skip-unknown")
    told.add_argument("--out", type=_csv_file, default=Path("predictions.csv"), metavar="OUT.csv",
                      help="the table; the page beside it ends with .html (default: %(default)s)")
    _add_shared(told, "--level")
    told.add_argument("--held-out", type=Path, metavar="FILE",
                      help="data that training did not use, for calibration, intervals and sets in place of "
                      "leave-one-out; needed for a structure that is not exact")
    told.add_argument("--retrain", action="store_true",
                      help="train a copy of the network on first, at precisions and noise that the evidence chooses: "
                      "for weights trained with little weight decay")
    _add_shared(told, "--classes")
