"""The demo's report: numbers and figures with explanations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ntk_laplace.tools.demo.pictures import Picture
from ntk_laplace.tools.demo.study import Study
from ntk_laplace.tools.report import Page

EXPLORER = "explanations.html"
"""File name of the interactive page of explanations."""

SCORES = ("run", "score", "network", "calibrated", "posterior")
_LABELS = {
    "accuracy": ("accuracy", "{:.1%}"),
    "log_likelihood": ("log likelihood (nats)", "{:.4f}"),
    "ece": ("calibration (ECE)", "{:.4f}"),
    "rmse": ("RMSE (sd of the target)", "{:.4f}"),
    "coverage_90": ("inside 90% intervals", "{:.1%}"),
    "unseen_auroc": ("other digits (AUROC)", "{:.3f}"),
}


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
    columns = ("run", "examples", "outputs", "parameters", "function space", "weight space", "relative difference")
    rows = [
        (
            found.problem.title, f"{found.summary['n']:,}", str(found.summary["outputs"]),
            f"{found.summary['parameters']:,}", f"{found.summary['evidence_gp']:.8f}",
            f"{found.summary['evidence_full']:.8f}", f"{found.summary['relative_difference']:.0e}",
        )
        for found in studies
    ]
    page.table("Log marginal likelihood of the training data, in nats", columns, rows)
    trained = [
        (
            found.problem.title, found.problem.network,
            ", ".join(f"{value:.3g}" for value in found.summary["prior_precisions"]),
            _noise(found.summary["noise_variance"]),
            f"{found.summary['newton_decrement']:.2g}", f"{found.summary['effective_parameters']:.1f}",
            f"{found.summary['variance_relative_difference']:.0e}", f"{found.summary['seconds']:.1f}",
        )
        for found in studies
    ]
    page.table(
        "How the networks were trained, and how their posteriors agree",
        ("run", "network", "prior precisions", "noise variance", "Newton decrement", "effective parameters",
         "variances differ by", "seconds"),
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
    columns = ("structure", "evidence", "difference", "log det B", "fit, seconds", "evidence, seconds", "MiB")
    for found in studies:
        if found.comparison is None:
            continue
        rows = [
            (
                row.structure,
                f"{row.evidence:.3f}" + (f" ± {row.standard_error:.2g}" if row.standard_error else ""),
                "exact" if row.difference is None else f"{row.difference:+.4g}", f"{row.log_det:.3f}",
                f"{row.fit_seconds:.3f}", f"{row.evidence_seconds:.3f}",
                "" if row.peak_memory is None else f"{row.peak_memory / 2**20:.1f}",
            )
            for row in found.comparison.rows
        ]
        page.table(f"{found.problem.title}: log marginal likelihood by structure, in nats, ± its standard error",
                   columns, rows)
        for row in found.comparison.rows:
            if row.note:
                page.paragraph(f"{row.structure}: {row.note}")
    _show(page, picture)


def _noise(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _show(page: Page, *pictures: Picture) -> None:
    for picture in pictures:
        page.picture(picture.image, picture.alt, picture.caption)
