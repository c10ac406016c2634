"""The demo's report: numbers and figures with explanations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ntk_laplace.tools.demo.pictures import Picture
from ntk_laplace.tools.demo.study import Study
from ntk_laplace.tools.report import Page

EXPLORER = "explanations.html"
"""File name of the interactive page of explanations."""

EVIDENCE = ("run", "N", "C", "P", "function space", "weight space", "diff.", "sec.")
SCORES = ("run", "score", "network", "calibrated", "posterior")
_LABELS = {
    "accuracy": ("accuracy", "{:.1%}"),
    "log_likelihood": ("log likelihood (nats)", "{:.4f}"),
    "ece": ("calibration (ECE)", "{:.4f}"),
    "rmse": ("RMSE (sd of the target)", "{:.4f}"),
    "coverage_90": ("inside 90% intervals", "{:.1%}"),
    "unseen_auroc": ("other digits (AUROC)", "{:.3f}"),
}


def evidence_rows(runs: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Evidence of every run, by its title, from function space and weight space, in nats."""
    return [
        (
            title, f"{run['n']:,}", str(run["outputs"]), f"{run['parameters']:,}", f"{run['evidence_gp']:#.10g}",
            f"{run['evidence_full']:#.10g}", f"{run['relative_difference']:.0e}", f"{run['seconds']:.1f}",
        )
        for title, run in runs.items()
    ]


def score_rows(studies: Sequence[Study]) -> list[tuple[str, ...]]:
    """Held-out scores of the network, the calibrated network and the posterior for every run."""
    rows = []
    for found in studies:
        for key, (label, form) in _LABELS.items():
            if key in found.summary:
                names = (f"map_{key}", f"calibrated_{key}", key)
                scores = (form.format(found.summary[name]) if name in found.summary else "" for name in names)
                rows.append((found.problem.title, label, *scores))
    return rows


def build(studies: Sequence[Study], pictures: dict[str, Picture], summary: dict[str, Any]) -> Page:
    """Assemble the report from studies, pictures by name, and the content of ``summary.json``."""
    worst = max(run["relative_difference"] for run in summary["runs"].values())
    page = Page(
        "A trained network as a Gaussian process",
        "Three networks, each trained with its evidence and turned into a Gaussian process by one linearization: "
        f"evidence from two spaces that agree to a relative {worst:.0e}, predictions with their uncertainty, and the "
        "training images behind them.",
        f"ntk_laplace {summary['version']}, torch {summary['torch']}, seed {summary['seed']}; "
        f"{summary['seconds']:.0f} seconds in all. The numbers are in summary.json.",
    )
    page.section("What an uncertain network looks like")
    _show(page, pictures["uncertainty_1d"], pictures["uncertainty_2d"])
    _evidence(page, studies)
    _structures(page, studies, pictures["structures"])
    page.section("Held-out predictions")
    page.paragraph(
        "The network has the usual weight decay, a prior precision of 1. The calibrated network has one number more, a "
        "temperature or a noise variance, from a tenth of the training data that it gives away for it. The posterior "
        "is trained with its evidence on all data; scale and temperature (or noise) are then fitted by leave-one-out, "
        "in closed form. Unfamiliar digits are told apart by the posterior as it is, before this calibration. No "
        "weight or hyperparameter saw the held-out data; the sizes of the problems were settled, when this demo was "
        "written, with such scores in view."
    )
    page.table("Held-out scores", SCORES, score_rows(studies))
    _show(page, pictures["reliability"], pictures["unseen"], pictures["coverage"])
    page.section("Choosing the prior without a validation set")
    page.paragraph(
        "Training with evidence chooses precisions while it trains. Another way is a grid: every candidate is trained "
        "once and scored by its evidence and by leave-one-out, both from that one fit to "
        "the training data. The evidence scores the model from the prior on; leave-one-out scores the prediction of "
        "one more example. Where they differ, the evidence is not the one to pick a predictor by (Lotfi et al., 2022). "
        "Leave-one-out takes an example out of the linearized refit, not out of the features that the network learnt "
        "from it, so it is too kind to a network that overfits."
    )
    _show(page, pictures["model_selection"])
    page.section("Training images that speak for and against a prediction")
    page.paragraph(
        "The effect of a training image is how far the log odds of the prediction over its runner-up would fall if it "
        "had been left out of the training, by one Newton step of the linearized refit from the posterior covariance."
    )
    _show(page, *(picture for name, picture in pictures.items() if name.startswith("explanation")))
    page.link(
        "Click through them: held-out fours and nines, the training images behind each, and what would be said without "
        "those", EXPLORER,
    )
    return page


def _evidence(page: Page, studies: Sequence[Study]) -> None:
    page.section("Evidence from two spaces")
    page.paragraph(
        "Function space factors a matrix with a row for each example and output, weight space one with a row for each "
        "parameter. Same model, same number: that is the check on everything else on this page."
    )
    runs = {found.problem.title: found.summary for found in studies}
    page.table("Log marginal likelihood of the training data, in nats, of N examples, C outputs and P parameters; the "
               "difference is relative", EVIDENCE, evidence_rows(runs))
    trained = [
        (
            found.problem.title, found.problem.network, ", ".join(f"{value:.3g}" for value in run["prior_precisions"]),
            "none" if run["noise_variance"] is None else f"{run['noise_variance']:.3g}",
            f"{run['newton_decrement']:.2g}", f"{run['effective_parameters']:.1f}",
            f"{run['variance_relative_difference']:.0e}",
        )
        for found, run in zip(studies, runs.values(), strict=True)
    ]
    page.table(
        "How the networks were trained, and how their posteriors agree",
        ("run", "network", "prior precisions", "noise variance", "Newton decrement", "effective parameters",
         "variances differ by"),
        trained,
    )
    page.paragraph(
        "There is one prior precision for each layer, chosen by the evidence. The Newton decrement says how far, in "
        "nats per example, the weights are from their optimum. Effective parameters are those that "
        "the data determine rather than the prior. Variances differ by: the largest difference between the two spaces' "
        "latent covariances at held-out inputs, relative to the largest entry. Seconds include all training."
    )


def _structures(page: Page, studies: Sequence[Study], picture: Picture) -> None:
    page.section("Evidence under every structure")
    page.paragraph(
        "Where neither exact matrix fits into memory, weight space is approximated: a Kronecker product for each layer "
        "(kfac), second moments in its eigenvectors (ekfac), the largest of these with a correction that keeps the "
        "exact diagonal (inf), or the diagonal alone (diag). Here all of them fit, and one sees what each gives away."
    )
    for found in studies:
        if found.comparison is None:
            continue
        columns, *rows = zip(*found.comparison.columns(), strict=True)
        page.table(f"{found.problem.title}: log marginal likelihood by structure, in nats; ± is its standard error",
                   columns, rows)
        for row in found.comparison.rows:
            if row.note:
                page.paragraph(f"{row.structure}: {row.note}")
    _show(page, picture)


def _show(page: Page, *pictures: Picture) -> None:
    for picture in pictures:
        page.picture(picture.image, picture.alt, picture.caption)
