"""The explorer: its numbers are the posterior's, and people can click through it."""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import ntk_laplace as ntkl
from browser import CHROMIUM, Browser
from ntk_laplace.tools.explorer import Naming, explore
from ntk_laplace.tools.explorer.sprites import images_of, sheet

KINDS = ("classes", "binary", "values")


@functools.cache
def case(kind: str) -> tuple[ntkl.Posterior, Tensor, Tensor, Tensor, Tensor]:
    """A posterior that is not at its optimum, its training inputs, and inputs with targets to explain."""
    torch.manual_seed(0)
    outputs = 3 if kind == "classes" else 1
    network = nn.Sequential(nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, outputs)).double()
    x, x_new = torch.rand(30, 16).double(), torch.rand(12, 16).double()
    make = {
        "classes": (ntkl.Categorical(), lambda n: torch.randint(3, (n,))),
        "binary": (ntkl.Bernoulli(), lambda n: torch.randint(2, (n, 1)).double()),
        "values": (ntkl.Gaussian(noise=0.3), lambda n: torch.randn(n, 1).double()),
    }
    likelihood, draw = make[kind]
    y, y_new = draw(30), draw(12)
    posterior = ntkl.laplace(network, (x, y), likelihood, ntkl.GaussianPrior(0.5))
    return posterior, x, y, x_new, y_new


def close(found: list | float, expected: Tensor) -> bool:
    """Equal to the four digits that the page holds."""
    return torch.allclose(torch.as_tensor(found).double(), expected.double(), rtol=1e-3, atol=1e-12)


def page_url(folder: Path) -> str:
    return (folder / "page.html").resolve().as_uri()


@pytest.mark.filterwarnings("ignore:leave-one-out is not to be trusted")
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_the_posteriors(kind: str) -> None:
    posterior, x, _, x_new, targets = case(kind)
    content = explore(posterior, x_new, x, targets, k=4).content
    explained, prediction = posterior.explain(x_new, k=4), posterior.predict(x_new, "glm")
    optimum = posterior.refit().explain(x_new, k=4)  # contributions are made of the residuals there
    assert float(optimum.gap.abs().max()) < 1e-6 < float(explained.gap.abs().max())
    assert content["atOptimum"] and not any("the gap is up to" in words for words in content["guarantees"])
    assert content["kind"] == kind and len(content["points"]) == 12 and content["examples"] == 30
    for i, point in enumerate(content["points"]):
        sign = -1.0 if kind == "binary" and explained.f[i, 0] < 0 else 1.0
        output = int(explained.output[i])
        effect, share = explained.effect[i] * sign, optimum.contributions[i, :, output] * sign
        for side, order in (("for", effect.argsort()), ("against", effect.argsort(descending=True))):
            assert [j for j, *_ in point[side]] == order[: len(point[side])].tolist() and len(point[side]) == 4
            for j, own, part in point[side]:
                assert close(own, effect[j]) and close(part, share[j])
                assert (own < 0) == (side == "for")
        parts = torch.tensor([point["offset"], point["plus"], point["minus"], point["gap"]])
        assert abs(float(parts.sum()) - sign * float(explained.f[i, output])) < 2e-3 * float(parts.abs().sum())
        assert close(point["gap"], sign * (explained.f[i, output] - optimum.f[i, output]))
        if kind == "values":
            assert point["target"] == pytest.approx(float(targets[i]), rel=1e-3)
            assert close(point["prediction"]["mean"], prediction.mean[i])
            assert close(point["prediction"]["deviation"], prediction.variance[i].sqrt())
        else:
            assert close(point["prediction"]["probabilities"][-1], prediction.probs[i].reshape(-1)[-1])
            assert point["target"] == int(targets[i]) and isinstance(point["target"], int)
            assert point["output"] == int(np.argmax(point["network"]["probabilities"]))
    left_out = posterior.leave_one_out()
    assert close(content["training"]["leverage"], left_out.leverage)
    assert close(content["training"]["logDensity"], left_out.log_density)
    assert close(content["training"]["selfInfluence"], left_out.self_influence)
    assert close(content["training"]["information"], left_out.information)


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_a_group_out_is_the_dense_newton_step(kind: str) -> None:
    """In weight space: f moves by -J (P0 + Σ J_iᵀΛ_iJ_i)⁻¹ Σ_G J_iᵀr_i, the first sum over those that stay."""
    posterior, x, _, x_new, targets = case(kind)
    network, likelihood = posterior.network, posterior.likelihood
    rows, new = posterior.fitted.model.jacobian_pass.rows(x), posterior.fitted.model.jacobian_pass.rows(x_new)

    def jacobian(of: object) -> Tensor:
        c = posterior.num_outputs
        columns = [of.jvp(network.unflatten(e)) for e in torch.eye(network.num_parameters).double()]
        return torch.stack(columns, -1).reshape(-1, c, network.num_parameters)

    own, other = jacobian(rows), jacobian(new)
    with torch.no_grad():
        hessian = likelihood.curvature(rows.f, posterior.targets)
        residual = likelihood.residual(rows.f, posterior.targets)
    for i, point in enumerate(explore(posterior, x_new, x, targets, k=4).content["points"]):
        for name, sides in (("for", ["for"]), ("against", ["against"]), ("both", ["for", "against"])):
            gone = [j for side in sides for j, *_ in point[side]]
            stay = torch.ones(30, dtype=torch.bool)
            stay[gone] = False
            precision = 0.5 * torch.eye(network.num_parameters).double()
            precision = precision + torch.einsum("nci,ncd,ndj->ij", own[stay], hessian[stay], own[stay])
            # from a stationary point the remaining gradient is the group's own, with its sign turned
            step = torch.linalg.solve(precision, torch.einsum("nci,nc->i", own[gone], residual[gone]))
            f = new.f[i] - other[i] @ step
            shown = torch.tensor(point["without"][name]["f"])
            sign = -1.0 if kind == "binary" and new.f[i, 0] < 0 else 1.0
            assert close((sign * shown).tolist(), f), (i, name)


@pytest.mark.slow
def test_a_page_of_five_hundred_inputs_stays_small_and_fetches_nothing() -> None:
    posterior, x, _, _, _ = case("classes")
    many = torch.rand(500, 16).double()
    page = explore(posterior, many, x, naming=Naming(shape=(4, 4), classes=["<b>", "</script>", "c"])).html()
    assert len(page.encode()) < 5e6
    script = re.search(r"<script>(.*)</script>\s*</body>", page, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page and "default-src 'none'" in page
    assert not re.search(r"(?:src|href)=[\"']?(?!data:)\w", page) and "@import" not in page
    # a name that ends an element does not
    numbers = re.search(r'id="data">(.*?)</script>', page, re.S).group(1)
    assert json.loads(numbers)["names"] == ["<b>", "</script>", "c"] and "<" not in numbers


def test_every_image_is_at_its_position_in_the_sheet() -> None:
    images = images_of(torch.rand(7, 1, 5, 6), None)
    found = sheet(images)
    whole = np.asarray(Image.open(io.BytesIO(base64.b64decode(found["source"].partition(",")[2]))))
    for slot, image in enumerate(images):
        top, left = slot // found["columns"] * 5, slot % found["columns"] * 6
        assert np.array_equal(whole[top : top + 5, left : left + 6], image)
    assert images_of(torch.rand(3, 3, 8, 8), None).shape == (3, 8, 8, 3)
    assert images_of(torch.rand(3, 200, 100), None).shape == (3, 50, 25)
    assert images_of(torch.rand(3, 10), None) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_tempered_likelihoods_responses_are_its_own(kind: str) -> None:
    posterior, x, y, x_new, targets = case(kind)
    once = ntkl.Tempered(posterior.likelihood, 1.0)
    tempered = ntkl.laplace(posterior.network.module, (x, y), once, ntkl.GaussianPrior(0.5))
    found, wanted = (explore(one, x_new, x, targets, k=4).content for one in (tempered, posterior))
    for key in ("kind", "names", "points", "training"):
        assert found[key] == wanted[key]


class Halves(nn.Module):
    """A network on inputs in two parts."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.whole(torch.cat([left, right], 1))


def test_inputs_of_several_parts() -> None:
    posterior, x, y, x_new, targets = case("classes")
    parts, parts_new = ({"left": each[:, :7], "right": each[:, 7:]} for each in (x, x_new))
    network = Halves(posterior.network.module)
    halves = ntkl.laplace(network, (parts, y), ntkl.Categorical(), ntkl.GaussianPrior(0.5))
    found, wanted = explore(halves, parts_new, parts, targets).content, explore(posterior, x_new, x, targets).content
    assert found["rows"] is found["pictures"] is None
    for ours, theirs in zip(found["points"], wanted["points"], strict=True):
        same(ours, theirs)
    with pytest.raises(ntkl.DataError, match="the 30 training inputs of the fit; got 12"):
        explore(halves, parts_new, parts_new)


def test_values_that_stand_for_the_inputs() -> None:
    posterior, x, _, x_new, _ = case("classes")
    new = pandas.DataFrame({"kind": ["oak", None] * 6, "height": np.arange(12) / 7.0, "planted": True})
    old = pandas.DataFrame({"kind": "elm", "height": np.arange(30) / 7.0, "planted": False})
    found = explore(posterior, x_new, x, naming=Naming(values=(new, old))).content["rows"]
    assert found["features"] == ["kind", "height", "planted"]
    assert found["points"][:2] == [["oak", 0.0, True], [None, 0.1429, True]] and len(found["points"]) == 12
    wanted = {str(j): ["elm", float(f"{j / 7.0:.4g}"), False] for j in range(30)}
    assert found["training"] and found["training"].items() <= wanted.items()
    arrays = Naming(features=["a", "b", "c"], values=(new.to_numpy(), old.to_numpy()))
    again = explore(posterior, x_new, naming=arrays).content["rows"]  # without training inputs
    assert again == found | {"features": ["a", "b", "c"]}
    for values, words in (
        ((new, old[:5]), r"values of shape \(30, 3\); got \(5, 3\)"), ((new, new), r"values of shape \(30, 3\)"),
        ((new, old[["kind"]]), r"values of shape \(30, 3\); got \(30, 1\)"),
        (([1, 2], old), r"values of shape \(12, 1\); got \(2,\)"),
    ):
        with pytest.raises(ntkl.DataError, match=words):
            explore(posterior, x_new, x, naming=Naming(values=values))
    with pytest.raises(ntkl.DataError, match="3 names of features; got 2"):
        explore(posterior, x_new, x, naming=Naming(features=["a", "b"], values=(new, old)))
    with pytest.raises(ntkl.DataError, match="expected a pair of tables as values; got a DataFrame"):
        explore(posterior, x_new, x, naming=Naming(values=new))
    with pytest.raises(ntkl.DataError, match="3 names of features; got 0"):
        explore(posterior, x_new, x, naming=Naming(values=(new.to_numpy(), old.to_numpy())))


def test_whole_numbers_among_the_inputs_keep_their_digits() -> None:
    posterior, x, _, x_new, _ = case("values")
    values = pandas.DataFrame({"zip": 98101.0 + np.arange(12), "day": 20150101 + np.arange(12), "area": 12345.6})
    known = pandas.DataFrame({"zip": np.full(30, np.nextafter(98169.0, 1e6)), "day": 20151231, "area": 12345.6})
    rows = explore(posterior, x_new, x, naming=Naming(values=(values, known)), k=2).content["rows"]
    assert rows["points"][1] == [98102, 20150102, 12346]
    assert all(row == [98169, 20151231, 12346] for row in rows["training"].values())


def test_digits_follow_the_range_of_a_column() -> None:
    """Numbers that are close to each other and far from 0 differ on the page; small ones beside large ones stay."""
    posterior, x, y, x_new, _ = case("values")
    degrees, wide = -71.06 + np.arange(12) / 1100, 10.0 ** np.arange(-6, 6)
    values = pandas.DataFrame({"degrees": degrees, "price": 100000.1 + np.arange(12) / 40, "wide": wide / 7,
                               "huge": 1e12 + np.arange(12) / 4})
    known = pandas.DataFrame({"degrees": [-71.055] * 30, "price": 100000.25, "wide": 1e5 / 7, "huge": 1e12})
    rows = explore(posterior, x_new, x, naming=Naming(values=(values, known)), k=2).content["rows"]
    assert rows["points"][1] == [-71.05909, 100000.125, float(f"{wide[1] / 7:.4g}"), 1e12 + 0.25]
    assert len({row[0] for row in rows["points"]}) == len({row[1] for row in rows["points"]}) == 12
    assert rows["spreads"] == pytest.approx([0.01, 0.275, 1e5 / 7, 2.75], rel=1e-3)
    far = ntkl.laplace(Shifted(posterior.network.module), (x, y + 2e5), posterior.likelihood, ntkl.GaussianPrior(0.5))
    wanted, found = (explore(one, x_new, x, y[:12] + by, k=2).content for one, by in ((posterior, 0), (far, 2e5)))
    for ours, theirs in zip(found["points"], wanted["points"], strict=True):
        for name, mean in (("network", "mean"), ("prediction", "mean")):
            assert ours[name][mean][0] - 2e5 == pytest.approx(theirs[name][mean][0], abs=1e-3)
        assert ours["target"] - 2e5 == pytest.approx(theirs["target"], abs=1e-3)
        total = ours["offset"] + ours["plus"] + ours["minus"] + ours["gap"]
        assert total == pytest.approx(ours["f"][0], abs=1e-2)
    assert np.allclose(np.subtract(found["training"]["target"], 2e5), wanted["training"]["target"], atol=1e-3)


class Shifted(nn.Module):
    """A network whose outputs are far from 0."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        return self.whole(x) + 2e5


def test_what_does_not_fit_is_refused() -> None:
    posterior, x, _, x_new, targets = case("classes")
    for arguments, words in (
        ({"training": x[:5]}, "expected the 30 training inputs of the fit; got 5"),
        ({"training": x.flip(0)}, "expected the inputs of the fit, in its order; got outputs that differ by"),
        ({"targets": targets[:3]}, "expected targets for 12 examples; got shape (3,)"),
        ({"targets": targets + 1}, "expected class labels in 0..2; got 3 at example"),
        ({"targets": targets + 0.5}, "expected class labels that are whole numbers; got"),
        ({"targets": ["ant"] * 12}, "expected targets as a tensor or an array of numbers; got list"),
        ({"naming": Naming(classes=["a"])}, "expected 3 names of classes or outputs; got 1"),
        ({"naming": Naming(features=["a"])}, "expected 16 names of features; got 1"),
        ({"naming": Naming(inputs=["a"])}, "expected 12 names of inputs; got 1"),
        ({"naming": Naming(training=["a"])}, "expected 30 names of training points; got 1"),
        ({"naming": Naming(shape=(3, 3))}, "expected inputs of 9 numbers, for images of"),
        ({"naming": Naming(shape=3)}, "expected a shape (height, width) of images"),
        ({"naming": Naming(shape=(-4, -4))}, "expected a shape (height, width) of images"),
        ({"naming": Naming(units=([1.0] * 3, [0.0] * 3))}, "expected a positive scale and a mean of each of 3"),
        ({"naming": "ants"}, "expected words as ntk_laplace.Naming(...); got 'ants'"),
        ({"targets": 5}, "expected targets for 12 examples; got shape ()"),
        ({"targets": torch.tensor(5)}, "expected targets for 12 examples; got shape ()"),
        ({"targets": np.array(["ant"] * 12)}, "expected targets as a tensor or an array of numbers; got ndarray"),
    ):
        with pytest.raises(ntkl.DataError, match=re.escape(words)):
            explore(posterior, x_new, **arguments)
    with pytest.raises(ntkl.DataError, match="at least one input"):
        explore(posterior, x_new[:0])


@functools.cache
def structured(kind: str, structure: str) -> ntkl.Posterior:
    """The same network and data in weight space."""
    posterior, x, y, _, _ = case(kind)
    return ntkl.laplace(posterior.network.module, (x, y), posterior.likelihood, ntkl.GaussianPrior(0.5), structure)


@pytest.mark.parametrize("kind", KINDS)
def test_weight_space_has_the_same_page(kind: str) -> None:
    """structure="full" is exact: every number of function space's page, the contributions as their sum."""
    posterior, x, _, x_new, targets = case(kind)
    found, exact = (explore(p, x_new, x, targets, k=4).content for p in (structured(kind, "full"), posterior))
    assert not found["approximate"] and any("exact for one Newton step" in words for words in found["guarantees"])
    for name in ("training", "names", "kind"):
        same(found[name], exact[name])
    for ours, theirs in zip(found["points"], exact["points"], strict=True):
        for name in ("output", "f", "offset", "gap", "for", "against", "without", "network"):
            same(ours[name], theirs[name])
        size = abs(theirs["plus"]) + abs(theirs["minus"])
        assert abs(ours["total"] - theirs["plus"] - theirs["minus"]) < 2e-3 * size


def same(found: object, expected: object) -> None:
    """Equal up to the four digits that the page holds."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            same(a, b)
    else:
        assert found == expected or abs(found - expected) <= 2e-3 * abs(expected) + 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_structured_page_leaves_groups_out_of_its_structure(kind: str) -> None:
    """As `remove` does; or to first order where the structure holds too little of the group, and says so."""
    _, x, _, x_new, targets = case(kind)
    first_order = 0
    for structure in ("kfac", "diag"):
        posterior = structured(kind, structure)
        content = explore(posterior, x_new, x, targets, k=4).content
        assert content["approximate"] and any("not the linearized model's" in words for words in content["guarantees"])
        explained, shares = posterior.explain(x_new, k=4), case(kind)[0].explain(x_new).share
        effects = posterior.removal_effects(x_new)
        for i, point in enumerate(content["points"]):
            sign = -1.0 if kind == "binary" and explained.f[i, 0] < 0 else 1.0
            for side, sides in (("for", explained.supporting()), ("against", explained.opposing())):
                mine = point[side if sign > 0 else {"for": "against", "against": "for"}[side]]
                assert [j for j, *_ in mine] == sides[i, : len(mine)].tolist()
                for j, effect, share in mine:
                    assert close(effect, sign * effects[i, j])
                    assert close(share, sign * shares[i, j])
            gone = [j for side in ("for", "against") for j, *_ in point[side]]
            now = point["without"]["both"]
            if "held" in now:
                first_order += 1
                residual = posterior.likelihood.residual(posterior.f, posterior.targets).detach()[gone]
                make = posterior.fitted.model.jacobian_pass.rows
                rows, new = make(x[gone]), make(x_new[i : i + 1])
                step = posterior.posterior_precision.solve(rows.vjp(residual, posterior.network.shapes))
                f = new.f - new.jvp(posterior.network.unflatten(step))
            else:
                f = posterior.remove(gone).outputs(x_new[i : i + 1])
            assert torch.allclose(sign * torch.tensor(now["f"]).double(), f[0], rtol=1e-3, atol=1e-3)
    assert first_order or kind != "classes"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_a_person_clicks_through_it(tmp_path: Path) -> None:
    posterior, x, _, x_new, targets = case("classes")
    naming = Naming(shape=(4, 4), classes=["ant", "bee", "cat"])
    page = explore(posterior, x_new, x, targets, k=3, naming=naming)
    points = page.content["points"]
    with Browser(page.write(tmp_path / "page.html"), tmp_path / "profile", "#2") as browser:
        assert browser.text("#which") == "Input 2"  # a link to one input
        browser.click("#point-4")
        assert browser.text("#which") == "Input 4" and browser.value("location.hash") == "#4"
        name = naming.classes[points[4]["output"]]
        assert browser.text("#prediction").startswith(f"{name} with probability")
        assert browser.value("document.querySelectorAll('#side-for li').length") == 3
        first = points[4]["for"][0]
        assert f"#{first[0]}, class" in browser.text("#side-for li")
        assert f"removing it lowers the logit of {name} by" in browser.text("#side-for li")
        assert browser.value("document.querySelector('#point-4').getAttribute('aria-selected')") == "true"
        # the keyboard: Tab moves nowhere strange, arrows choose
        browser.value("document.getElementById('points').focus()")
        browser.press("ArrowDown")
        assert browser.text("#which") == "Input 5"
        browser.press("End")
        assert browser.text("#which") == "Input 11"
        browser.press("Home")
        assert browser.text("#which") == "Input 0"
        # what if: the group leaves, and the words and the bars say what then
        assert "Choose a group" in browser.text("#answer")
        browser.click("input[value=for]")
        said = browser.text("#answer")
        assert said.startswith("Without these 3:") and "instead of" in said
        browser.click("#point-1")
        assert "Choose a group" in browser.text("#answer")  # another input starts anew
        # finding: only wrong ones are left
        browser.click("#find")
        browser.type("wrong")
        wrong = [i for i, point in enumerate(points) if point["target"] != point["output"]]
        assert browser.value("[...document.querySelectorAll('#points li')].map((e) => e.id)") == [
            f"point-{i}" for i in wrong
        ]
        assert browser.text("#found") == f"{len(wrong)} of 12 inputs"
        # the table: sorting both ways, searching, showing more
        values = "[...document.querySelectorAll('#rows tr')].map((e) => Number(e.children[4].innerText))"
        browser.click("#columns th:nth-child(5) button")
        up = browser.value(values)
        browser.click("#columns th:nth-child(5) button")
        down = browser.value(values)
        assert len(up) == 25 and up == sorted(up) and down == sorted(down, reverse=True) and up != down
        assert browser.value("document.querySelector('#columns th:nth-child(5)').ariaSort") == "descending"
        browser.click("#more")
        assert len(browser.value(values)) == 30
        # every column sorts; minus signs are found as hyphens
        read = ("[...document.querySelectorAll('#rows tr')]"
                ".map((e) => Number(e.children[%d].innerText.replace('−', '-')))")
        for place in (4, 6, 7):
            browser.click(f"#columns th:nth-child({place}) button")
            found = browser.value(read % (place - 1))
            assert len(found) == 30 and found == sorted(found)
        lowest = browser.text("#rows td:nth-child(4)")
        browser.click("#search")
        browser.type(lowest.replace("−", "-"))
        assert lowest.startswith("−") and browser.text("#rows td:nth-child(4)") == lowest
        browser.value("document.getElementById('search').value = ''")
        browser.type("#17")
        assert browser.text("#rows th").strip() == "#17"
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith("data:")] == [page_url(tmp_path)]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_inputs_and_training_points_have_their_names(tmp_path: Path) -> None:
    """In the list, the explanations, the section on sources and the table; both are found by them."""
    posterior, x, _, x_new, targets = case("classes")
    inputs, training = [f"new/{i}.png" for i in range(12)], [f"row {3 * j + 100}" for j in range(30)]
    sources = posterior.source_effects(x_new, ["a", "b"] * 15)
    page = explore(posterior, x_new, x, targets, k=3, naming=Naming(inputs=inputs, training=training), candidates=1,
                   sources=sources)
    with Browser(page.write(tmp_path / "page.html"), tmp_path / "profile", "#2") as browser:
        assert browser.text("#which") == "Input new/2.png" and browser.text("#point-2").startswith("new/2.png: ")
        point = page.content["points"][2]
        assert browser.text("#side-for li").startswith(training[point["for"][0][0]] + ", class")
        assert browser.text("#again-rows th").strip() == training[point["reranked"][0][0]]
        assert "of input new/2.png, largest first" in browser.text("#source-caption")
        browser.click("#find")
        browser.type("new/7.png")
        assert browser.text("#points li").startswith("new/7.png") and browser.text("#found") == "1 of 12 inputs"
        browser.click("#search")
        browser.type("row 187")
        assert browser.text("#rows th").strip() == "row 187"
        assert browser.text("#shown") == "1 of 1 training points, of 30 in all"
        assert "#" not in browser.text("main") and browser.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_of_a_structured_posterior_states_its_guarantees(tmp_path: Path) -> None:
    _, x, _, x_new, targets = case("classes")
    page = explore(structured("classes", "diag"), x_new, x, targets, k=3, naming=Naming(shape=(4, 4)))
    held = next(i for i, point in enumerate(page.content["points"]) if "held" in point["without"]["both"])
    with Browser(page.write(tmp_path / "page.html"), tmp_path / "profile", f"#{held}") as browser:
        assert "all points" in browser.value("document.querySelector('#decomposition svg').textContent")
        assert "approximate curvature" in browser.value("document.body.innerText")
        browser.click("details summary")
        assert "own curvature, which is not the linearized model's" in browser.text("details ul")
        browser.click("input[value=both]")
        assert "of first order alone" in browser.text("#answer")
        assert browser.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_it_fits_a_phone(tmp_path: Path) -> None:
    """Nothing but tables is wider than the screen, and the words of the picture keep their size. Two outputs."""
    x, x_new = case("values")[1], case("values")[3]
    torch.manual_seed(1)
    y, y_new = torch.randn(30, 2).double(), torch.randn(12, 2).double()
    y_new[0, 1] = torch.nan
    posterior = ntkl.laplace(nn.Linear(16, 2).double(), (x, y), ntkl.Gaussian(0.3), ntkl.GaussianPrior(0.5))
    sources = posterior.source_effects(x_new, ["a long name of a source", "b"] * 15)
    found = explore(posterior, x_new, x, y_new, naming=Naming(["price", "rent"]), sources=sources)
    found.content["points"][0] |= {"plus": 1234567.25, "minus": -1234567.75}
    with Browser(found.write(tmp_path / "page.html"), tmp_path / "profile") as browser:
        words, each = browser.text("#prediction p"), r"[\d.e−]+"
        assert re.match(rf"price {each} ± {each}, rent {each} ± {each} \(of the model price", words), words
        assert re.search(rf"The truth is price {each}, rent missing\.$", words)
        browser.click("input[value=both]")
        words = rf": price {each} instead of {each}, rent {each} instead of {each}\."
        assert re.search(words, browser.text("#answer"))
        browser.click("#columns th:nth-child(2) button")  # by the output that is explained
        cells = browser.value("[...document.querySelectorAll('#rows td:nth-child(2)')].map((e) => e.innerText)")
        shown = [float(cell.replace("−", "-").split()[1].rstrip(",")) for cell in cells]
        assert len(shown) == 25 and shown == sorted(shown) and shown[0] < 0 < shown[-1]
        for width in (1280, 390):
            browser.ask("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1,
                        mobile=width < 500)
            browser.value("window.dispatchEvent(new Event('resize'))")
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value("document.querySelector('#source-caption').getBoundingClientRect().right") < width
            letters = browser.value("document.querySelector('svg text').getBoundingClientRect().height")
            assert 12 < letters < 24
            edge = browser.value("document.querySelector('svg').getBoundingClientRect().right")
            ends = browser.value("[...document.querySelectorAll('svg text')].map(e => e.getBoundingClientRect().right)")
            assert max(ends) <= edge < width
        assert browser.errors == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("kind", ("binary", "values"))
def test_other_targets_have_their_own_words(tmp_path: Path, kind: str) -> None:
    posterior, x, _, x_new, targets = case(kind)
    tables = [pandas.DataFrame({
        "degrees": -71.06 + rows[:, 0].numpy() / 100, "price": 100000.1 + rows[:, 1].numpy() / 4,
        "area": 1234.5 + 1e4 * rows[:, 2].numpy(), "height": 2.25, "kind": ["oak", None, "elm"] * (len(rows) // 3)})
        for rows in (x_new, x)]
    page = explore(posterior, x_new, x, targets, naming=Naming(target="weight", values=tuple(tables)))
    with Browser(page.write(tmp_path / "page.html"), tmp_path / "profile") as browser:
        browser.click("input[value=both]")
        # digits of the range of a column, and those before the point; what is constant or far is not alike
        words = browser.text("#prediction .soft").replace("−", "-")
        first = tables[0].iloc[0]
        assert words == (f"degrees {float(f'{first.degrees:.5f}')}, price {float(f'{first.price:.3f}')}, "
                         f"area {first.area:.0f}, height 2.25, kind oak")
        alike = browser.value("[...document.querySelectorAll('.sides .soft')].map((e) => e.innerText)")
        assert alike and not any("height" in one or "elm" in one or "missing" in one for one in alike)
        for words in "".join(alike).split("alike in ")[1:]:
            areas = [float(part.split()[1]) for part in words.split(", ") if part.startswith("area ")]
            assert all(abs(area - first.area) <= 2600 for area in areas)
        if kind == "values":
            assert browser.text("#prediction").startswith("weight ") and "of the model" in browser.text("#prediction")
            assert "weight" in browser.text("#answer")
        else:
            assert "the logit of" in browser.text("#side-for") and "%" in browser.text("#answer")
        assert browser.errors == []
