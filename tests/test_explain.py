"""Explanations against refits: shares add up to the prediction, removals are Newton steps, all in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ntk_laplace as ntkl
from reference import jacobian, outputs, relative_error
from registry import LIKELIHOODS, NETWORKS, PRIORS, problem, targets
from test_identities import TURNS, fit, ids, jacobians, tolerance, trained, truth

pytestmark = pytest.mark.filterwarnings("ignore::ntk_laplace.errors.NTKLaplaceWarning")


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_shares_add_up(case):
    """f(x) = offset + Σ contributions + gap, and each part is what it is said to be."""
    reference, limit = truth(*case), tolerance(case[0], 1e-9)
    explanation = fit(*case, "gp").explain(problem(case[0]).x_new)
    jac = jacobians(case[0])[1]
    shares = torch.einsum("xcp,p,nkp,nk->xnc", jac, 1 / reference.precision, reference.jac, reference.residual)
    assert relative_error(explanation.contributions, shares) < limit
    f = outputs(problem(case[0]).network, problem(case[0]).x_new)
    assert relative_error(explanation.offset, f - jac @ reference.offset) < limit
    total = explanation.offset + explanation.contributions.sum(1) + explanation.gap
    assert relative_error(total, f) < limit


@pytest.mark.parametrize("case", TURNS, ids=ids)
def test_removing_a_point_is_a_newton_step_without_it(case):
    """-V_xi (I - Λ_i V_ii)⁻¹ r_i is J_x times -(H - J_iᵀΛ_iJ_i)⁻¹ J_iᵀr_i, in weight space."""
    reference, limit = truth(*case), tolerance(case[0], 1e-8)
    explanation = fit(*case, "gp").explain(problem(case[0]).x_new)
    loo = fit(*case, "gp").leave_one_out()
    jac_new = jacobians(case[0])[1]
    effects, means, covariances, leverages = [], [], [], []
    each = torch.einsum("ncp,ncd,ndq->npq", reference.jac, reference.hessian, reference.jac)
    f_train = outputs(problem(case[0]).network, problem(case[0]).x)
    for i, (jac, curvature, residual, f) in enumerate(
        zip(reference.jac, reference.hessian, reference.residual, f_train, strict=True)
    ):
        # summed over the others: a difference would lose what a point of high leverage drowns
        without = torch.cat([each[:i], each[i + 1 :]]).sum(0) + torch.diag(reference.precision)
        step = -torch.linalg.solve(without, jac.T @ residual)
        effects.append(jac_new @ step)
        means.append(f + jac @ step)
        covariances.append(jac @ torch.linalg.solve(without, jac.T))
        inner = jac @ torch.linalg.solve(reference.posterior_precision, jac.T)
        leverages.append(torch.linalg.eigvals(curvature @ inner).real.max())
    assert relative_error(explanation.removal, torch.stack(effects, 1)) < limit
    assert relative_error(loo.mean, torch.stack(means)) < limit
    assert relative_error(loo.covariance, torch.stack(covariances)) < limit
    for leverage in (explanation.leverage, loo.leverage):
        assert (leverage - torch.stack(leverages)).abs().max() < limit
        assert 0 <= leverage.min() and leverage.max() < 1


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_at_the_map_there_is_no_gap(likelihood):
    """The representer identity of [T20] 5.2 at a stationary point."""
    case, y = trained(likelihood)
    prior = PRIORS["scalar"].build(case)
    posterior = ntkl.laplace(case.network, (case.x, y), LIKELIHOODS[likelihood].build(), prior=prior)
    explanation = posterior.explain(case.x_new)
    assert explanation.gap.abs().max() < 1e-8 * explanation.f.abs().max()
    away = fit("far_from_optimum", likelihood, "scalar", "gp").explain(case.x_new)
    assert away.gap.abs().max() > 1e-2


def test_linear_regression_without_a_point_is_the_refit():
    """Identity 7: a linear model at its MAP, refitted without each point in turn."""
    noise, delta = 0.3, 0.7
    torch.manual_seed(1)
    network, x, y = torch.nn.Linear(3, 2).double(), torch.randn(8, 3).double(), torch.randn(8, 2).double()
    design = torch.cat([x, torch.ones(8, 1).double()], 1)

    def weights(rows: Tensor) -> Tensor:
        gram = design[rows].T @ design[rows] / noise + delta * torch.eye(4, dtype=torch.float64)
        return torch.linalg.solve(gram, design[rows].T @ y[rows] / noise)

    with torch.no_grad():
        best = weights(torch.arange(8))
        network.weight.copy_(best[:3].T)
        network.bias.copy_(best[3])
    new = torch.randn(4, 3).double()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(noise=noise), ntkl.GaussianPrior(delta))
    explanation, loo = posterior.explain(new), posterior.leave_one_out()
    for i in range(8):
        refit = weights(torch.tensor([n for n in range(8) if n != i]))
        change = torch.cat([new, torch.ones(4, 1).double()], 1) @ (refit - best)
        assert relative_error(explanation.removal[:, i], change) < 1e-10
        assert relative_error(loo.mean[i], design[i] @ refit) < 1e-10
        rows = torch.tensor([n for n in range(8) if n != i])
        spread = design[rows].T @ design[rows] / noise + delta * torch.eye(4, dtype=torch.float64)
        variance = design[i] @ torch.linalg.solve(spread, design[i]) + noise
        density = torch.distributions.Normal(loo.mean[i], variance.sqrt()).log_prob(y[i]).sum()
        assert relative_error(loo.log_density[i], density) < 1e-9


def test_signs_and_order_are_those_the_words_say():
    """Supporting points come first by how far their removal lowers the output."""
    case = problem("deep_mlp")
    y = targets(LIKELIHOODS["categorical"], case)
    explanation = ntkl.laplace(case.network, (case.x, y), ntkl.Categorical()).explain(case.x_new, k=3)
    assert torch.equal(explanation.output, outputs(case.network, case.x_new).argmax(1))
    for i, output in enumerate(explanation.output):
        order = explanation.removal[i, :, output].argsort()
        assert torch.equal(explanation.supporting()[i], order[:3])
        assert torch.equal(explanation.opposing()[i], order.flip(0)[:3])
    table = explanation.to_dataframe()
    assert len(table) == len(case.x_new) * 6
    for _, row in table.iterrows():
        assert row["removal_effect"] == explanation.effect[row["input"], row["training_index"]].item()
        assert ("lowers" in row["meaning"]) == (row["removal_effect"] < 0)
        if row["speaks"] != "neither":
            assert (row["speaks"] == "for") == (row["removal_effect"] < 0)


def test_the_jacobians_behind_the_table_are_the_references():
    """Rows used here come from the same place as the identities': a shared slip would show in one number."""
    case = problem("deep_mlp")
    assert relative_error(jacobians("deep_mlp")[0], jacobian(case.network, case.x)) == 0
    assert NETWORKS["deep_mlp"].outputs == 5
