"""Structures side by side: each at the caller's own hyperparameters, none lost to another's failure."""

from __future__ import annotations

import copy
import functools
import json
import sys
import warnings
import weakref
from typing import Any

import pandas
import pytest
import torch
from torch import nn

import ntk_laplace as ntkl
from ntk_laplace.plotting import png
from ntk_laplace.runtime import meter
from ntk_laplace.structures import structure_names
from ntk_laplace.tools.comparison import compare

QUIET = ntkl.Settings(progress=False)


def case(outputs: int = 3) -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    network = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, outputs)).double()
    return network, (torch.randn(25, 4).double(), torch.randint(0, outputs, (25,)))


def layered() -> ntkl.GaussianPrior:
    return ntkl.GaussianPrior({"0": 0.5, "2": 3.0}, mean=0.1, groups="layer")


@pytest.fixture(autouse=True)
def _no_collection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting garbage before each fit takes most of the time of these small ones; memory alone depends on it."""
    if "memory" not in request.node.name:
        monkeypatch.setattr(meter.gc, "collect", lambda: 0)


# --- the numbers


@pytest.mark.slow
@pytest.mark.parametrize(("curvature", "correction"), [("ggn", False), ("ggn", True), ("ef", True), ("mc", False)])
def test_every_row_equals_a_separate_fit(curvature: str, correction: bool) -> None:
    network, data = case()
    found = ntkl.compare_evidence(
        network, data, ntkl.Categorical(), layered(), curvature=curvature, correction=correction, settings=QUIET
    )
    assert [row.structure for row in found.rows] == list(structure_names()) and found.exact == "gp"
    assert (found.num_examples, found.num_outputs, found.num_parameters) == (25, 3, 59)
    for row in found.rows:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "INF's low-rank part", ntkl.NTKLaplaceWarning)
            alone = ntkl.laplace(network, data, ntkl.Categorical(), layered(), row.structure, curvature, settings=QUIET)
        assert row.evidence == pytest.approx(alone.log_marginal_likelihood(correction).item(), rel=1e-10)
        assert row.log_det == pytest.approx(alone.log_det().item(), rel=1e-10)
        assert row.log_joint == pytest.approx(alone.log_joint().item(), rel=1e-10)
        whole = alone.log_marginal_likelihood(True) - alone.log_marginal_likelihood(False)
        assert row.correction == (pytest.approx(whole.item(), rel=1e-6) if correction else None)
        assert row.note[:11] == ("note: INF's" if row.structure == "inf" else "")
        assert row.fit_seconds > 0 and row.evidence_seconds > 0
        expected = None if row.structure == "gp" else row.evidence - found["gp"].evidence
        assert row.difference == expected
    assert found["full"].difference == pytest.approx(0.0, abs=1e-8) and abs(found["diag"].difference) > 0.01


def test_differences_need_an_exact_structure_and_take_the_first() -> None:
    network, data = case()
    for structures, exact in ((["diag", "full", "gp"], "full"), (["kfac", "auto"], "auto"), (["kfac", "diag"], None)):
        found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, structures, settings=QUIET)
        assert found.exact == exact
        without = [row.structure for row in found.rows if row.difference is None]
        assert without == ([exact] if exact else structures)


def test_arguments_reach_every_fit() -> None:
    network, (x, y) = case()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    options = dict(curvature=ntkl.CurvatureType("mc", samples=2, seed=5), parameters="last_layer", dtype=torch.float32)
    options["settings"] = QUIET
    found = ntkl.compare_evidence(network, loader, ntkl.Categorical(), None, ["full", "diag"], **options)
    assert found.num_parameters == 24 and found.num_examples == 25
    for row in found.rows:
        alone = ntkl.laplace(network, loader, ntkl.Categorical(), structure=row.structure, **options)
        assert row.evidence == alone.log_marginal_likelihood().item()


def test_a_stream_must_be_the_same_for_every_structure() -> None:
    network, (x, y) = case()

    class Anew(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(x, y, strict=True)

    class Once(Anew):
        def __init__(self) -> None:
            self.left = super().__iter__()

        def __iter__(self):
            return self.left

    load = functools.partial(torch.utils.data.DataLoader, batch_size=10)
    found, want = (ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["gp", "diag"], settings=QUIET)
                   for data in (load(Anew()), (x, y)))
    assert found.num_examples == len(x)
    for name in ("gp", "diag"):
        assert found[name].evidence == pytest.approx(want[name].evidence, rel=1e-12)
    with pytest.raises(ntkl.DataError, match=r"the same .* examples in every pass"):
        ntkl.compare_evidence(network, load(Once()), ntkl.Categorical(), None, ["gp", "diag"], settings=QUIET)


def test_objects_of_the_caller_do_not_change() -> None:
    network, (x, _) = case(2)
    y, likelihood, prior = torch.randn(25, 2).double(), ntkl.Gaussian(noise=torch.rand(25, 2) + 0.1), layered()
    weights, noise = copy.deepcopy(network.state_dict()), likelihood.noise.clone()
    state, parts = torch.get_rng_state(), dict(vars(likelihood))
    ntkl.compare_evidence(network, (x, y), likelihood, prior, settings=QUIET)
    assert all(torch.equal(value, weights[name]) for name, value in network.state_dict().items())
    assert all(p.grad is None for p in network.parameters()) and network.training
    assert torch.equal(likelihood.noise, noise) and vars(likelihood).keys() == parts.keys()
    assert prior.log_precision is None and torch.equal(torch.get_rng_state(), state)  # not bound to this network
    ntkl.GaussianPrior.bind(prior, {"0.weight": torch.Size([1]), "2.weight": torch.Size([1])})


# --- labels


def test_labels_are_unique() -> None:
    network, data = case()
    basis = ntkl.laplace(network, data, ntkl.Categorical(), structure="kfac", settings=QUIET)
    structures = [
        "kfac", ntkl.KFAC(sharing="reduce", damped=True), ntkl.INF(rank=0.5), ntkl.INF(rank="trace:0.9"), "kfac",
        ntkl.EKFAC(basis=basis), ntkl.Diagonal(),
    ]
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, structures, settings=QUIET)
    assert [row.structure for row in found.rows] == [
        "kfac #1", "kfac(sharing=reduce, damped=True)", "inf(rank=0.5)", "inf(rank=trace:0.9)", "kfac #2",
        "ekfac(basis=...)", "diag",
    ]
    assert all(row.evidence is not None for row in found.rows)
    assert found["kfac #1"].evidence == found["kfac #2"].evidence != found.rows[1].evidence
    with pytest.raises(KeyError, match="no structure 'gp' among kfac #1, "):
        found["gp"]


@pytest.mark.parametrize(
    ("structures", "words"),
    [
        (["gp", "kfak"],
         "expected structure among gp, full, iterative, nystrom, kfac, ekfac, inf, diag, auto; got 'kfak'. Use"),
        ([ntkl.KFAC], "expected a structure's name or an object; got the class KFAC. Write KFAC(), with its options."),
        ("gp", "expected a list of structures; got 'gp'. Pass one such as \\['gp', "),
        ([], "expected a list of structures; got \\[\\]"),
    ],
)
def test_wrong_structures_are_refused_before_the_work(
    structures: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "laplace", lambda *_, **__: pytest.fail("work began"))
    network, data = case()
    with pytest.raises(ntkl.UnsupportedError, match=words.replace("()", "\\(\\)")):
        ntkl.compare_evidence(network, data, ntkl.Categorical(), None, structures)


# --- what goes wrong


def test_a_structure_that_does_not_fit_gets_a_note_and_the_others_continue() -> None:
    network, data = case()
    # B of gp takes 50² float64 and its rows; JᵀΛJ and H of full take 2 x 59²
    found = ntkl.compare_evidence(
        network, data, ntkl.Categorical(), None, settings=ntkl.Settings(progress=False, memory_budget=48_000)
    )
    refused = {row.structure: row for row in found.rows if row.evidence is None}
    assert "full" in refused and found["diag"].evidence is not None
    assert refused["full"].note.startswith("refused: expected the 59 x 59 matrices of weight space to fit into")
    assert refused["full"].peak_memory is None and refused["full"].difference is None


@pytest.mark.slow
def test_all_refused_for_memory_is_a_table_too() -> None:
    network, data = case()
    settings = ntkl.Settings(progress=False, memory_budget=10)
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["gp", "full"], settings=settings)
    assert [row.evidence for row in found.rows] == [None, None] and found.exact is None
    assert str(found).count("refused: ") == 2 and found.plot() is not None


def test_a_prior_that_one_structure_does_not_support() -> None:
    network, data = case()
    prior = ntkl.GaussianPrior(groups="parameter")
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), prior, settings=QUIET)
    assert [row.structure for row in found.rows if row.evidence is None] == ["kfac", "ekfac"]
    assert found["kfac"].note.startswith("refused: expected one prior precision per layer or tensor for 'kfac'")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "note"),
    [
        (ntkl.NumericalError("a factor", "none", "Stop."), "failed: expected a factor; got none. Stop."),
        (MemoryError(), "failed: out of memory (MemoryError)"),
        (torch.OutOfMemoryError("CUDA out of memory.\nmore"), "failed: out of memory (CUDA out of memory)"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
         "failed: out of memory (DefaultCPUAllocator: can't allocate memory: you tried)"),
        (ntkl.NonFiniteError("finite inputs", "NaN", "Look."), "failed: expected finite inputs; got NaN. Look."),
    ],
)
def test_a_failure_after_the_first_value_is_a_row(
    error: Exception, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_at(monkeypatch, "full", error)
    network, data = case()
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["gp", "full", "diag"], settings=QUIET)
    assert found["full"] == ntkl.StructureEvidence("full", note=note)
    assert found["gp"].evidence is not None and found["diag"].evidence is not None


def test_errors_that_are_not_the_structures_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    network, (x, y) = case()
    for data, error in (((x, y + 1), ntkl.TargetError), ((x[:3], y), ntkl.DataError), ((x[:, :2], y), ntkl.DataError)):
        with pytest.raises(error):
            ntkl.compare_evidence(network, data, ntkl.Categorical(), settings=QUIET)
    with pytest.raises(ntkl.HyperparameterError, match="a precision for every group"):
        ntkl.compare_evidence(network, (x, y), ntkl.Categorical(), ntkl.GaussianPrior({"0": 1.0}, groups="layer"))
    with pytest.raises(ntkl.HyperparameterError):  # no structure has a value, and it is not for memory
        noise = ntkl.Gaussian(noise=torch.ones(7))
        ntkl.compare_evidence(network, (x, torch.randn(25, 3)), noise, settings=QUIET)
    with pytest.raises(ntkl.UnsupportedError, match="a likelihood object"):
        ntkl.compare_evidence(network, (x, y), "categorical", settings=QUIET)
    with pytest.raises(ntkl.UnsupportedError, match="without checkpoint and resume"):
        ntkl.compare_evidence(network, (x, y), ntkl.Categorical(), settings=ntkl.Settings(checkpoint="c.pt"))
    fail_at(monkeypatch, "full", ValueError("a mistake of ours"))
    with pytest.raises(ValueError, match="a mistake of ours"):
        ntkl.compare_evidence(network, (x, y), ntkl.Categorical(), settings=QUIET)


def test_interruption_keeps_the_finished_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    fail_at(monkeypatch, "full", KeyboardInterrupt())
    network, data = case()
    with pytest.raises(KeyboardInterrupt, match="interrupted after kfac, gp") as stopped:
        ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["kfac", "gp", "full"], settings=QUIET)
    found = stopped.value.comparison
    assert isinstance(stopped.value, ntkl.ComparisonInterrupted) and found.exact == "gp"
    assert found["kfac"].difference == found["kfac"].evidence - found["gp"].evidence


@pytest.mark.parametrize("place", ["_warm_up", "_measure"])
def test_interruption_at_any_moment_keeps_them(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, seen = getattr(compare, place), []

    def second_is_interrupted(*arguments: Any) -> Any:
        seen.append(place)
        if len(seen) == 2:
            raise KeyboardInterrupt
        return work(*arguments)

    monkeypatch.setattr(compare, place, second_is_interrupted)
    network, data = case()
    with pytest.raises(ntkl.ComparisonInterrupted) as stopped:
        ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["gp", "diag"], settings=QUIET)
    assert [row.structure for row in stopped.value.comparison.rows] == ["gp"]


def fail_at(monkeypatch: pytest.MonkeyPatch, structure: str, error: BaseException) -> None:
    fit = compare.laplace

    def failing(*arguments: Any, **options: Any) -> ntkl.Posterior:
        toy = isinstance(arguments[2], ntkl.Gaussian)
        if structure in arguments and not toy:
            raise error
        return fit(*arguments, **options)

    monkeypatch.setattr(compare, "laplace", failing)


def test_warnings_become_notes_and_others_reach_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    fit = compare.laplace

    def warning(*arguments: Any, **options: Any) -> ntkl.Posterior:
        warnings.warn("no rule for a layer", ntkl.NTKLaplaceWarning, stacklevel=1)
        warnings.warn("torch will change", FutureWarning, stacklevel=1)
        return fit(*arguments, **options)

    monkeypatch.setattr(compare, "laplace", warning)
    network, data = case()
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["gp", "diag"], settings=QUIET)
    assert [row.note for row in found.rows] == ["note: no rule for a layer", ""]
    assert [w.category for w in heard] == [FutureWarning] * 2  # and none of the toys'
    assert str(found).endswith("\ngp: note: no rule for a layer") and "note" not in str(found).splitlines()[5]


# --- what is measured


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is estimated elsewhere")
def test_memory_is_of_the_size_of_the_matrices() -> None:
    network = nn.Sequential(nn.Linear(60, 40), nn.Tanh(), nn.Linear(40, 4)).double()  # P = 2,604
    data = torch.randn(50, 60).double(), torch.randint(0, 4, (50,))
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["full", "diag"], settings=QUIET)
    matrix = 2604**2 * 8
    assert 1.9 * matrix < found["full"].peak_memory < 4 * matrix  # JᵀΛJ and the factor of H
    assert found["diag"].peak_memory < 0.25 * matrix


@pytest.mark.slow
def test_memory_of_a_failed_fit_is_free_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref] = []
    fit = compare.laplace

    def failing(*arguments: Any, **options: Any) -> ntkl.Posterior:
        if "full" in arguments and not isinstance(arguments[2], ntkl.Gaussian):
            large = torch.zeros(1000)
            held.append(weakref.ref(large))
            raise ntkl.NumericalError("a factor", "none", "Stop.") from ValueError("of torch")
        assert all(reference() is None for reference in held)
        return fit(*arguments, **options)

    monkeypatch.setattr(compare, "laplace", failing)
    network, data = case()
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["full", "diag"], settings=QUIET)
    assert len(held) == 1 and found["diag"].evidence is not None


def test_first_use_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy of every structure comes before what is measured, with the same curvature and floating type."""
    seen: list[tuple[str, bool]] = []
    fit = compare.laplace

    @functools.wraps(fit)
    def watched(network: nn.Module, data: Any, likelihood: Any, prior: Any, structure: str, *rest: Any, **more: Any):
        seen.append((structure, isinstance(likelihood, ntkl.Gaussian)))
        return fit(network, data, likelihood, prior, structure, *rest, **more)

    monkeypatch.setattr(compare, "laplace", watched)
    network, data = case()
    ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["gp", "diag"], curvature="ef", settings=QUIET)
    assert seen == [("gp", True), ("gp", False), ("diag", True), ("diag", False)]


def test_an_option_that_laplace_does_not_have_is_an_error_before_anything_is_fitted() -> None:
    network, data = case()
    with pytest.raises(TypeError, match="unexpected keyword argument 'curvatures'"):
        ntkl.compare_evidence(network, data, ntkl.Categorical(), curvatures="ef")


def test_progress_is_written_to_the_error_stream_if_asked(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    network, data = case()
    for wanted in (True, False, None):
        settings = ntkl.Settings(progress=wanted)
        ntkl.compare_evidence(network, data, ntkl.Categorical(), None, ["gp", "diag"], settings=settings)
        said = capsys.readouterr()
        assert ("diag, 2 of 2" in said.err) == bool(wanted) and said.out == ""


# --- what is shown


def comparison() -> ntkl.EvidenceComparison:
    rows = (
        ntkl.StructureEvidence("gp", -1234567.891234, None, 2345.678, -1230000.25, None, 123.456, 0.5, 3 * 2**30),
        ntkl.StructureEvidence("full", note="refused: expected room; got none. " + "Buy memory. " * 9),
        ntkl.StructureEvidence("kfac", -1234577.891234, -10.0, 2365.678, -1230000.25, None, 1.5, 0.01, None),
    )
    return ntkl.EvidenceComparison(rows, "gp", 60_000, 10, 1_234_567, "Categorical, prior precision 1, curvature ggn")


def test_the_table_fits_a_terminal_and_is_complete() -> None:
    lines = str(comparison()).splitlines()
    assert max(map(len, lines)) <= 80 + 10  # numbers of this size; the usual ones stay below 80
    assert lines[:2] == [
        "Log marginal likelihood, in nats",
        "N = 60,000, C = 10, P = 1,234,567; Categorical, prior precision 1, curvature ggn",
    ]
    cells = [line.split() for line in lines[5:8]]
    assert cells[0] == ["gp", "-1234567.891", "exact", "2345.678", "-1230000.250", "123.46", "0.50", "3.0", "GiB"]
    assert cells[1] == ["full", "refused", *"------"]
    assert cells[2] == ["kfac", "-1234577.891", "-10", "2365.678", "-1230000.250", "1.50", "0.01", "-"]
    assert lines[9] == "difference: from gp, which is exact for this curvature"
    assert lines[10].startswith("full: refused: expected room; got none. Buy memory.") and lines[11][:3] == "  m"
    assert len(lines) == 12


def test_table_of_a_small_case_is_eighty_wide() -> None:
    network, data = case()
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), None, settings=QUIET)
    assert max(map(len, str(found).splitlines())) <= 80
    assert "Categorical (temperature 1), prior precision 1," in str(found)
    found = ntkl.compare_evidence(network, data, ntkl.Categorical(), layered(), ["kfac"], settings=QUIET)
    assert "2 prior precisions from 0.5 to 3" in found.model and "difference" not in str(found)


def test_the_heading_tells_of_every_noise() -> None:
    network, (x, y) = nn.Linear(3, 2).double(), torch.randn(2, 12, 3).double()
    likelihood = ntkl.Gaussian([0.1, 0.4], "output")
    found = ntkl.compare_evidence(network, (x, y[:, :2]), likelihood, structures=["diag"], settings=QUIET)
    assert "Gaussian (2 values of noise from 0.1 to 0.4)" in found.model


def test_frame_and_json_contain_every_digit() -> None:
    found = comparison()
    frame = found.to_dataframe()
    assert list(frame["structure"]) == ["gp", "full", "kfac"] and frame["evidence"][0] == -1234567.891234
    assert pandas.isna(frame["evidence"][1]) and frame["note"][1].startswith("refused")
    read = json.loads(found.to_json())
    assert [ntkl.StructureEvidence(**row) for row in read.pop("rows")] == list(found.rows)
    assert read == {"exact": "gp", "num_examples": 60_000, "num_outputs": 10, "num_parameters": 1_234_567,
                    "model": found.model}


@pytest.mark.slow
def test_picture_shows_the_rows() -> None:
    figure = comparison().plot()
    left, middle, right = figure.axes
    assert [tick.get_text() for tick in left.get_yticklabels()] == ["gp", "full", "kfac"]
    assert [text.get_text() for text in left.texts][1:] == ["no value", "\N{MINUS SIGN}10"]
    assert [bar.get_width() for bar in middle.patches] == pytest.approx([123.456, 0.5, 1.5, 0.01])
    assert [bar.get_width() for bar in right.patches] == [3072.0]
    assert png(figure).startswith(b"\x89PNG")
