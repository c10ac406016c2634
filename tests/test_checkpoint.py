"""Checkpoints: saved, opened with weights_only, loaded, and what they refuse."""

from __future__ import annotations

import copy
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntk_laplace as ntkl
from refusals import refused

STRUCTURES = {
    "gp": "gp", "full": "full", "kfac": "kfac", "reduce": ntkl.KFAC(sharing="reduce"), "ekfac": "ekfac",
    "inf": ntkl.INF(rank=0.3), "diag": "diag",
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).double().eval()


def data(n: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(3, (n,), generator=generator)


def fit(structure: object, curvature: str = "ggn", **options: object) -> ntkl.Posterior:
    prior = ntkl.GaussianPrior(2.0, mean=0.1, groups="layer")
    return ntkl.laplace(network(), data(), ntkl.Categorical(1.3), prior, structure, curvature, **options)


def holds_training_data(saved: object, x: Tensor) -> bool:
    """Whether any tensor in a container has an entry for each example, or the inputs' own memory."""
    if isinstance(saved, Tensor):
        return len(x) in saved.shape
    children = saved.values() if isinstance(saved, dict) else saved if isinstance(saved, (list, tuple)) else ()
    return any(holds_training_data(child, x) for child in children)


@pytest.mark.filterwarnings("ignore:INF's low-rank part")
@pytest.mark.parametrize("curvature", ["ggn", "ef"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_loaded_posterior_answers_as_the_saved_one(name: str, curvature: str, tmp_path: Path) -> None:
    posterior, path, x = fit(STRUCTURES[name], curvature), tmp_path / "posterior.pt", data(5)[0]
    with torch.no_grad():
        posterior.prior.precision = torch.tensor([0.5, 3.0, 1.5])
    posterior.save(path, include_data=True)
    loaded = ntkl.load(path, network())
    assert repr(loaded) == repr(posterior)
    for verb in ("log_marginal_likelihood", "log_det", "effective_parameters"):
        torch.testing.assert_close(getattr(loaded, verb)(), getattr(posterior, verb)(), rtol=1e-12, atol=1e-12)
    for one, other in zip(loaded.latent_moments(x), posterior.latent_moments(x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(loaded.predict(x).probs, posterior.predict(x).probs, rtol=1e-12, atol=1e-12)
    loaded.prior.precision = posterior.prior.precision = 7.0
    torch.testing.assert_close(loaded.log_det(), posterior.log_det(), rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:INF's low-rank part")
@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != "gp"])
def test_a_checkpoint_without_data_contains_none_and_names_what_needs_them(name: str, tmp_path: Path) -> None:
    posterior, path = fit(STRUCTURES[name]), tmp_path / "posterior.pt"
    (x, y), n = data(), len(data()[1])
    posterior.save(path)
    assert not holds_training_data(torch.load(path, weights_only=True), torch.zeros(n))
    loaded = ntkl.load(path, network())
    torch.testing.assert_close(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood(), rtol=1e-12,
                               atol=1e-12)
    (gradient,) = torch.autograd.grad(loaded.log_marginal_likelihood(), loaded.prior.log_precision)
    (expected,) = torch.autograd.grad(posterior.log_marginal_likelihood(), posterior.prior.log_precision)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(loaded.latent_moments(x)[1], posterior.latent_moments(x)[1], rtol=1e-12, atol=1e-12)
    with pytest.raises(ntkl.NTKLaplaceError, match=r"data=\.\.\."):
        loaded.log_marginal_likelihood(correction=True)
    with pytest.raises(ntkl.NTKLaplaceError, match="training data"):
        loaded.likelihood.temperature = 2.0
        loaded.log_marginal_likelihood()
    again = ntkl.load(path, network(), data=(x, y))
    for options in ({"correction": True}, {}):
        torch.testing.assert_close(again.log_marginal_likelihood(**options),
                                   posterior.log_marginal_likelihood(**options), rtol=1e-10, atol=1e-10)
    again.likelihood.temperature = posterior.likelihood.temperature = 0.8
    torch.testing.assert_close(again.log_marginal_likelihood(), posterior.log_marginal_likelihood(), rtol=1e-10,
                               atol=1e-10)


def test_without_data_the_evidence_is_a_constant_of_the_likelihood(tmp_path: Path) -> None:
    """A slope in the noise of log det B alone would be half of the truth."""
    network, points = nn.Linear(2, 1).double(), (torch.randn(9, 2).double(), torch.randn(9, 1).double())
    ntkl.laplace(network, points, ntkl.Gaussian(0.5), structure="kfac").save(tmp_path / "posterior.pt")
    loaded = ntkl.load(tmp_path / "posterior.pt", network)
    loaded.log_marginal_likelihood().backward()
    assert not loaded.likelihood.log_noise.grad and loaded.prior.log_precision.grad.abs().sum() > 0


def test_function_space_is_made_of_its_data(tmp_path: Path) -> None:
    with pytest.raises(ntkl.UnsupportedError, match="include_data=True"):
        fit("gp").save(tmp_path / "posterior.pt")
    assert not list(tmp_path.iterdir())


def test_every_likelihood_and_prior_is_restored(tmp_path: Path) -> None:
    x, path = data()[0], tmp_path / "posterior.pt"
    y = torch.rand(len(x), 3, dtype=torch.float64)
    covariance = 0.3 * torch.eye(3, dtype=torch.float64) + 0.1
    shapes = {name: parameter.shape for name, parameter in network().named_parameters()}
    mean = {name: torch.full(shape, 0.2, dtype=torch.float64) for name, shape in shapes.items()}
    cases = [
        (ntkl.Gaussian(covariance), y), (ntkl.Gaussian(torch.rand(13, 3) + 0.1, kind="point"), y),
        (ntkl.Gaussian(torch.tensor([0.1, 0.2, 0.3])), y), (ntkl.Poisson(), (y * 4).round()),
        (ntkl.StudentT(torch.tensor([0.1, 0.2, 0.3]), 2.5), y),
        (ntkl.Bernoulli(), y.round()),
    ]
    groups = {"conv": ["0"], "rest": ["2", "4"]}
    for likelihood, targets in cases:
        prior = ntkl.GaussianPrior({"conv": 0.5, "rest": 2.0}, mean=mean, groups=groups)
        posterior = ntkl.laplace(network(), (x, targets), likelihood, prior, "kfac")
        posterior.save(path, include_data=True)
        loaded = ntkl.load(path, network())
        torch.testing.assert_close(loaded.log_marginal_likelihood(correction=False),
                                   posterior.log_marginal_likelihood(correction=False), rtol=1e-12, atol=1e-12)
        assert loaded.prior.group_names == posterior.prior.group_names


def test_your_own_likelihood_must_be_passed(tmp_path: Path) -> None:
    def cauchy(f: Tensor, y: Tensor) -> Tensor:
        return -(y - f).cosh().log().sum(1)

    x, path = data()[0], tmp_path / "posterior.pt"
    y = torch.rand(len(x), 3, dtype=torch.float64)
    posterior = ntkl.laplace(network(), (x, y), ntkl.CustomLikelihood(cauchy), structure="diag")
    posterior.save(path)
    with pytest.raises(ntkl.UnsupportedError, match="pass it to load"):
        ntkl.load(path, network())
    loaded = ntkl.load(path, network(), likelihood=ntkl.CustomLikelihood(cauchy))
    torch.testing.assert_close(loaded.log_det(), posterior.log_det())


def test_other_networks_and_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "posterior.pt"
    fit("kfac").save(path)
    wider = copy.deepcopy(network())
    wider[4] = nn.Linear(16, 5).double()
    with pytest.raises(ntkl.NetworkError, match=r"4\.weight of shape \(5, 16\) \(fit: \(3, 16\)\)"):
        ntkl.load(path, wider)
    with pytest.raises(ntkl.NetworkError, match=r"no 4\.weight"):
        ntkl.load(path, network()[:4])
    moved = network()
    with torch.no_grad():
        moved[4].weight += 1e-6
    with pytest.raises(ntkl.NetworkError, match="other weights"):
        ntkl.load(path, moved)
    for none in (None, network().state_dict()):
        with pytest.raises(ntkl.NetworkError, match=r"a torch\.nn\.Module; got a"):
            ntkl.load(path, none)
    with pytest.raises(ntkl.UnsupportedError, match="a Settings object"):
        ntkl.load(path, network(), settings={"batch_size": 3})
    x, y = data()
    with pytest.raises(ntkl.DataError, match="13 training examples; got 12"):
        ntkl.load(path, network(), data=(x[1:], y[1:]))


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04", nn.Linear(1, 1), {"weights": 1}, [1]])
def test_files_that_are_no_checkpoint(content: object, tmp_path: Path) -> None:
    """A file that asks for code to be run is refused without torch's advice to run it."""
    path = tmp_path / "other.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    readers = {
        r"of a posterior at .*written by posterior\.save": lambda place: ntkl.load(place, network()),
        r"of an interrupted fit at .*Settings\(checkpoint": lambda place: fit(
            "kfac", settings=ntkl.Settings(resume=place)
        ),
    }
    for words, read in readers.items():
        for place, got in ((path, "an"), (tmp_path, "what cannot be read"), (tmp_path / "none.pt", "no such file")):
            with pytest.raises(ntkl.DataError, match=words.replace(" at ", rf" at .*; got (what|{got})")) as caught:
                read(place)
            assert "weights_only" not in str(caught.value)
    with pytest.raises(ntkl.DataError, match="a path of a checkpoint of a posterior; got None"):
        ntkl.load(None, network())


def test_a_damaged_file(tmp_path: Path) -> None:
    """torch.load gave other numbers, without a word."""
    path = tmp_path / "posterior.pt"
    torch.save({"format": "ntk_laplace posterior", "version": 1, "numbers": torch.full((1000,), 3.0)}, path)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255  # one of these numbers
    path.write_bytes(content)
    with pytest.raises(ntkl.DataError, match=r"got a damaged one, whose \S+ has another checksum\. Copy"):
        ntkl.load(path, network())


@pytest.mark.parametrize("place", ["nowhere/posterior.pt", "", None])
def test_places_where_nothing_can_be_written(place: str | None, tmp_path: Path) -> None:
    with pytest.raises(ntkl.DataError, match=r"as checkpoint; got None|a checkpoint in an existing"):
        fit("diag").save(place if place is None else tmp_path / place)


def with_statistics(weight: float = 1.0, mean: float = 0.5) -> nn.Module:
    """A head that is linearized, on a frozen layer of `weight` and normalization around `mean`."""
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    with torch.no_grad():
        found[0].weight[0, 0] = weight
        found[1].running_mean += mean
    return found


@pytest.mark.parametrize("other", [{"weight": 2.0}, {"mean": 0.6}])
@pytest.mark.parametrize("structure", ["gp", "kfac"])
def test_what_is_frozen_belongs_to_the_network(structure: str, other: dict[str, float], tmp_path: Path) -> None:
    """A frozen layer or statistics of another network, beneath equal linearized weights."""
    x, y = torch.randn(10, 3).double(), torch.arange(10) % 2
    options = {"structure": structure, "parameters": "last_layer"}
    posterior = ntkl.laplace(with_statistics(), (x, y), ntkl.Categorical(), **options)
    posterior.save(tmp_path / "p.pt", include_data=True)
    assert torch.equal(ntkl.load(tmp_path / "p.pt", with_statistics()).predict(x).probs, posterior.predict(x).probs)
    with refused(ntkl.NetworkError, "frozen parameters and buffers", "others", "whole network"):
        ntkl.load(tmp_path / "p.pt", with_statistics(**other))
    theirs = ntkl.laplace(with_statistics(**other), (x, y), ntkl.Categorical(), **options)
    with refused(ntkl.UnsupportedError, "equal parameters and buffers", "two networks", "Fit both"):
        posterior.merge(theirs)
    saved = torch.load(tmp_path / "p.pt", weights_only=True)
    del saved["fixed"], saved["points"]["ordered"]  # files of earlier releases have neither
    torch.save(saved, tmp_path / "p.pt")
    ntkl.load(tmp_path / "p.pt", with_statistics(**other))
    ntkl.load(tmp_path / "p.pt", with_statistics(), data=(x, y))


@pytest.mark.parametrize(("own", "other", "differ"), [
    (ntkl.Bernoulli(), ntkl.Poisson(), "Bernoulli and Poisson"),
    (ntkl.Tempered(ntkl.Bernoulli(), 1.0), ntkl.Tempered(ntkl.Bernoulli(), 3.0), "weight=1.0 and with weight=3.0"),
    (ntkl.HeteroscedasticGaussian(), ntkl.HeteroscedasticGaussian("natural"), "'log variance' and with .*'natural'"),
], ids=["class", "weight", "parametrization"])
def test_another_likelihood_is_neither_merged_nor_loaded(
    own: ntkl.Likelihood, other: ntkl.Likelihood, differ: str, tmp_path: Path
) -> None:
    """Sums over the data keep the curvature of the likelihood that they were fitted with."""
    torch.manual_seed(0)
    network, x, y = nn.Linear(3, 2).double(), torch.randn(6, 3).double(), torch.ones(6, own.num_responses(2)).double()
    first, second = (ntkl.laplace(network, (x, y), likelihood, structure="full") for likelihood in (own, other))
    with refused(ntkl.UnsupportedError, "one likelihood", differ, "Fit both"):
        first.merge(second)
    first.save(tmp_path / "p.pt", include_data=True)
    with refused(ntkl.UnsupportedError, "as in the fit", differ.split()[-1], "Pass the likelihood"):
        ntkl.load(tmp_path / "p.pt", network, likelihood=other)
    again = ntkl.load(tmp_path / "p.pt", network, likelihood=own)
    assert again.merge(first).num_examples == 12


@pytest.mark.parametrize(("layer", "error"), [
    (nn.Dropout(0.5), ntkl.NonDeterministicError), (nn.BatchNorm1d(6), ntkl.MixedExamplesError),
], ids=["dropout", "batch norm"])
def test_a_network_that_is_loaded_in_training_mode_is_refused_by_every_verb(
    layer: nn.Module, error: type[ntkl.NTKLaplaceError], tmp_path: Path
) -> None:
    """A new module is in training mode: means and weight samples of it were random, or mixed examples."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), copy.deepcopy(layer), nn.Tanh(), nn.Linear(6, 2)).double().eval()
    x = torch.randn(20, 3, dtype=torch.float64, device="cpu")
    labels = torch.randint(2, (20,), device="cpu")
    posterior = ntkl.laplace(network, (x, labels), ntkl.Categorical(), structure="full")
    posterior.save(tmp_path / "posterior.pt")
    for verb in (
        lambda loaded: loaded.outputs(x[:5]),
        lambda loaded: loaded.predict(x[:5], "map").probs,
        lambda loaded: loaded.predict(x[:5], "nn", generator=torch.Generator().manual_seed(0)).probs,
        lambda loaded: loaded.predict(x[:5]).probs,
    ):
        loaded = ntkl.load(tmp_path / "posterior.pt", copy.deepcopy(network).train())
        with pytest.raises(error, match=r"network\.eval\(\)"):
            verb(loaded)
        assert torch.equal(verb(ntkl.load(tmp_path / "posterior.pt", network)), verb(posterior))


def test_counters_and_buffers_that_are_not_saved_may_differ(tmp_path: Path) -> None:
    x, y = torch.randn(10, 3).double(), torch.arange(10) % 2
    network, other = with_statistics(), with_statistics()
    ntkl.laplace(network, (x, y), ntkl.Categorical()).save(tmp_path / "p.pt", include_data=True)
    other[1].num_batches_tracked += 7
    other[2].register_buffer("cache", torch.ones(3), persistent=False)
    ntkl.load(tmp_path / "p.pt", other)


@pytest.mark.parametrize("include_data", [True, False])
@pytest.mark.parametrize("name", ["gp", "full", "kfac"])
def test_data_of_another_fit_are_refused(name: str, include_data: bool, tmp_path: Path) -> None:
    """Another label or row, or the same rows in another order."""
    if name == "gp" and not include_data:
        pytest.skip("function space is made of its data")
    path, (x, y) = tmp_path / "p.pt", data()
    posterior = fit(name)
    posterior.save(path, include_data=include_data)
    loaded = ntkl.load(path, network(), data=(x, y), settings=ntkl.Settings(batch_size=4))
    torch.testing.assert_close(loaded.log_marginal_likelihood(), posterior.log_marginal_likelihood())
    one = (torch.arange(13) == 5).long()
    for other in ((x, (y + one) % 3), (x + one[:, None, None, None], y)):
        with refused(ntkl.DataError, "data of the fit, of log likelihood -", "data of -", "fitted to"):
            ntkl.load(path, network(), data=other)
    with refused(ntkl.DataError, "in their order", "another order", "without shuffling"):
        ntkl.load(path, network(), data=(x.flip(0), y.flip(0)))


def test_data_of_a_refit_and_of_single_precision_are_recognized(tmp_path: Path) -> None:
    x, y = data()
    refit = fit("full").refit()
    refit.save(tmp_path / "refit.pt")
    loaded = ntkl.load(tmp_path / "refit.pt", network(), data=(x, y))
    torch.testing.assert_close(loaded.log_marginal_likelihood(), refit.log_marginal_likelihood())
    single = ntkl.laplace(network().float(), (x.float(), y), ntkl.Categorical(), structure="kfac")
    single.save(tmp_path / "single.pt")
    ntkl.load(tmp_path / "single.pt", network().float(), data=(x.float(), y), settings=ntkl.Settings(batch_size=1))


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize("name", ["gp", "full", "kfac"])
def test_verbs_that_read_the_data_work_after_single_precision(name: str, tmp_path: Path) -> None:
    """Outputs that were rounded are still known as those of the fit; others are not."""
    posterior, x, path = fit(STRUCTURES[name]), data()[0], tmp_path / "p.pt"
    posterior.to(dtype=torch.float32).to(dtype=torch.float64)
    posterior.save(path, include_data=True)
    for one in (posterior, ntkl.load(path, network(), data=data())):
        assert torch.isfinite(one.elbo("nn", samples=4).value)
        one.importance_evidence(4)
    if name == "gp":
        moved = (one.remove([0], linearization="moving").outputs(x) for one in (fit("gp"), posterior))
        torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-4)
    if name != "kfac":
        posterior.remove([0]).relinearize()
    if name != "gp":
        posterior.save(path)
        ntkl.load(path, network()).save(path)  # the rounding is known without the outputs too
        assert torch.isfinite(ntkl.load(path, network(), data=data()).elbo("nn", samples=4).value)
    with pytest.raises(ntkl.DataError, match="the inputs of the fit, in its order"):
        posterior.elbo("nn", samples=4, x=x + 1e-3)


@functools.cache
def compiled() -> tuple[nn.Module, nn.Module, nn.Module]:
    """One network as it is, compiled, and with a layer that is; fits leave them alone."""
    plain, whole, layer = network(), network(), network()
    layer[4] = torch.compile(layer[4], backend="aot_eager")
    return plain, torch.compile(whole, backend="aot_eager"), layer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:INF's low-rank part")
@pytest.mark.parametrize("name", STRUCTURES)
def test_torch_compile_between_saving_and_loading(name: str, tmp_path: Path) -> None:
    """Its wrappers have a word of their own in all names, in those of the prior's groups too."""
    x, path = data(5)[0], tmp_path / "posterior.pt"
    plain, whole, layer = compiled()
    for one in (plain, whole, layer):
        names = [name for name, _ in one.named_parameters()]
        layers = {name.rpartition(".")[0] for name in names[:-2]}
        prior = ntkl.GaussianPrior({"last": 3.0, "rest": 0.5}, groups={"last": names[-2:], "rest": sorted(layers)})
        posterior = ntkl.laplace(one, data(), ntkl.Categorical(), prior, STRUCTURES[name])
        posterior.save(path, include_data=True)
        for other in (plain, whole, layer):
            loaded = ntkl.load(path, other)
            assert loaded.network.names == [name for name, _ in other.named_parameters()]
            torch.testing.assert_close(loaded.latent_moments(x), posterior.latent_moments(x), rtol=1e-12, atol=1e-12)
            loaded.prior.precision = {"last": 1.0, "rest": 2.0}
            loaded.log_marginal_likelihood()


class NamedLikeWords(torch.nn.Module):
    """Its parameters have the names of fields and kinds that checkpoints use themselves."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"weight": (2, 3), "diag": (2,), "kronecker": (2,), "Outer": (2,), "kfac": (2,)}.items():
            self.register_parameter(name, torch.nn.Parameter(torch.randn(shape).double()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T * self.diag + self.kronecker).tanh() * self.Outer + self.kfac


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize("build", [lambda: torch.nn.Linear(3, 2).double(), NamedLikeWords], ids=["layer", "words"])
@pytest.mark.parametrize("name", STRUCTURES)
def test_torch_compile_where_parameters_are_called_like_fields(name, build, tmp_path):
    plain, path = build(), tmp_path / "posterior.pt"
    compiled = torch.compile(plain, backend="aot_eager")
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    for one, other in ((plain, compiled), (compiled, plain)):
        posterior = ntkl.laplace(one, (x, y), ntkl.Gaussian(0.1), structure=STRUCTURES[name])
        posterior.save(path, include_data=True)
        loaded = ntkl.load(path, other)
        assert loaded.network.names == [name for name, _ in other.named_parameters()]
        torch.testing.assert_close(loaded.latent_moments(x), posterior.latent_moments(x), rtol=1e-12, atol=1e-12)


def test_a_chosen_part_and_a_frozen_part_come_back(tmp_path: Path) -> None:
    path = tmp_path / "posterior.pt"
    posterior = fit("ekfac", parameters="last_layer")
    posterior.save(path)
    loaded = ntkl.load(path, network())
    assert loaded.network.names == ["4.weight", "4.bias"]
    torch.testing.assert_close(loaded.log_det(), posterior.log_det())


@pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")
@pytest.mark.parametrize("structure", ["kfac", "ekfac", "inf", "diag"])
def test_a_noise_that_moved_after_the_fit_is_in_the_sums_that_are_saved(structure, tmp_path):
    """A table's curvature follows it on the inner side, a layer's on the outer one."""
    network = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Flatten(), torch.nn.Linear(6, 2)).double()
    x, y = torch.randint(5, (9, 2)), torch.randn(9, 2).double()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(1.0), structure=structure)
    posterior.likelihood.noise = 0.2
    fresh = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.2), structure=structure)
    posterior.latent_moments(x)  # eigenvectors are made, and saved
    posterior.save(tmp_path / "moved.pt")
    loaded = ntkl.load(tmp_path / "moved.pt", network)
    for each in (posterior, loaded):
        assert each.log_det().item() == pytest.approx(fresh.log_det().item(), rel=1e-10)
        assert torch.allclose(each.latent_moments(x)[1], fresh.latent_moments(x)[1], rtol=1e-8, atol=1e-12)


def test_the_keys_of_a_checkpoint_stay(tmp_path) -> None:
    """Files of version 1 load for as long as the version is 1: names in the code may change, keys in a file may not."""
    network = torch.nn.Linear(3, 2).double()
    data = torch.randn(6, 3).double(), torch.arange(6) % 2
    keys = {"gp": {"blocks", "num_seeds", "num_examples", "f"}, "kfac": {"form", "model", "parts", "sums", "frames"}}
    for structure, expected in keys.items():
        ntkl.laplace(network, data, ntkl.Categorical(), structure=structure).save(tmp_path / "p.pt", include_data=True)
        saved = torch.load(tmp_path / "p.pt", weights_only=True)
        assert saved["version"] == 1 and saved["root"] == {"curvature": "ggn", "samples": 1, "seed": 0}
        assert any(isinstance(part, dict) and expected <= part.keys() for part in saved.values())


def test_two_writers_of_one_path_and_a_write_that_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both wrote into one partial file; the one of a write that failed stayed. Two machines number processes alike."""
    path, save, meeting = tmp_path / "posterior.pt", torch.save, threading.Barrier(2)
    posterior = fit("diag")

    def slow(record: Any, partial: Any) -> None:
        meeting.wait(10)  # both have begun
        save(record, partial)
        meeting.wait(10)  # and both have ended

    monkeypatch.setattr(torch, "save", slow)
    monkeypatch.setattr(threading, "get_native_id", lambda: 7)
    threads = [threading.Thread(target=posterior.save, args=(path,)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setattr(torch, "save", save)
    assert ntkl.load(path, network()).num_examples == 13

    def failing(record: Any, partial: Path) -> None:
        partial.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", failing)
    with pytest.raises(OSError, match="no space"):
        posterior.save(path)
    assert [found.name for found in tmp_path.iterdir()] == ["posterior.pt"]
