"""One posterior in several threads: each gets the answers that it would get alone, and settings come back."""

from __future__ import annotations

import copy
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import ntk_laplace as ntkl
from ntk_laplace.jacobian import JacobianPass
from ntk_laplace.model.network import ManyWeights, Network
from ntk_laplace.runtime.threads import ProcessWide, ReadersAndWriters


class Pausing(nn.Module):
    """In another thread than the main one, waits once where other weights stand in place of its own."""

    paused: threading.Event | None = None

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        paused = Pausing.paused
        own = all(isinstance(weight, nn.Parameter) and weight.any() for weight in self.parameters())
        if not own and paused is not None and threading.current_thread() is not threading.main_thread():
            already = paused.is_set()
            paused.set()
            threading.Event().wait(0 if already else 0.05)
        found: Tensor = self.last(self.hidden(x).tanh())
        return found


class Meeting(nn.Sequential):
    """Its first call in a thread, of a training, waits as that thread is to."""

    waits: ClassVar[dict[int, Callable[[], object]]] = {}

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            Meeting.waits.pop(threading.get_ident(), lambda: None)()
        found: Tensor = super().forward(x)
        return found


class Scaled(torch.autograd.Function):
    """A function that no rule covers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


class Uncovered(Pausing):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Scaled.apply(x, self.scale))


def data(n: int = 12) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randn(n, 3).double()
    return x, x.sum(1, keepdim=True)


def fitted(kind: Callable[[], nn.Module] = Pausing, **options: Any) -> ntkl.Posterior:
    torch.manual_seed(0)
    return ntkl.laplace(kind().double().eval(), data(), ntkl.Gaussian(0.1), **options)


OTHERS: dict[str, Callable[[ntkl.Posterior, Tensor], object]] = {
    "weight samples": lambda posterior, x: posterior.predict(x, "nn", samples=2),
    "rows at other weights": lambda posterior, x: JacobianPass(posterior.network, x.dtype).rows(
        x, theta=0 * posterior.network.theta),
    "rows of the fallback": lambda posterior, x: posterior.predict(x[:2]),
}


@pytest.mark.filterwarnings("ignore:no factor rule covers")
@pytest.mark.parametrize("other", OTHERS)
def test_weights_of_another_thread_are_not_seen(other: str) -> None:
    kind = Uncovered if other == "rows of the fallback" else Pausing
    posterior, (x, _) = fitted(kind, structure="full"), data()
    expected, Pausing.paused = posterior.predict(x), threading.Event()
    try:
        thread = threading.Thread(target=OTHERS[other], args=(posterior, x))
        thread.start()
        assert Pausing.paused.wait(10)
        found = posterior.predict(x)
        thread.join()
    finally:
        Pausing.paused = None
    assert torch.equal(found.mean, expected.mean) and torch.equal(found.variance, expected.variance)


@pytest.mark.parametrize("read", [lambda network: network.theta, lambda network: copy.deepcopy(network).theta])
def test_weights_are_read_after_those_of_another_thread(read: Callable[[Network], Tensor]) -> None:
    network, inside = Network(nn.Linear(2, 1)), threading.Event()
    own = network.theta

    def move() -> None:
        with network.with_theta(0 * own):
            inside.set()
            threading.Event().wait(0.02)

    thread = threading.Thread(target=move)
    thread.start()
    assert inside.wait(10.0) and torch.equal(read(network), own)
    thread.join()


def test_the_first_answers_of_a_loaded_posterior(tmp_path: Path) -> None:
    """Its network is probed at the first of them."""
    torch.manual_seed(0)
    network, (x, y) = Pausing().double().eval(), data()
    posterior = ntkl.laplace(network, (x, y), ntkl.Gaussian(0.1), structure="full")
    posterior.save(tmp_path / "posterior.pt")
    expected, loaded = posterior.predict(x), ntkl.load(tmp_path / "posterior.pt", network)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: loaded.predict(x[:n]), range(1, len(x) + 1)))
    for n, one in enumerate(found, 1):
        torch.testing.assert_close(one.variance, expected.variance[:n], rtol=1e-10, atol=0)


class Watching(TorchDispatchMode):
    """At a matrix product without oneDNN, says so and waits."""

    def __init__(self, told: threading.Event, wait: threading.Event) -> None:
        super().__init__()
        self.told, self.wait = told, wait

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and not torch.backends.mkldnn.enabled:
            self.told.set()
            self.wait.wait(10)
        return func(*args, **(kwargs or {}))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.unsqueeze(1))[0][:, -1]
        return found


def test_recurrent_layers_in_two_threads_leave_the_kernels_on() -> None:
    """Each thread restored what it found: the last one found them off."""
    network, (x, _) = Network(Recurrent().double()), data()
    one, two, done = threading.Event(), threading.Event(), threading.Event()

    def evaluate(told: threading.Event, wait: threading.Event) -> None:
        with Watching(told, wait):
            network.evaluate(x)

    threads = [threading.Thread(target=evaluate, args=events) for events in ((one, two), (two, done))]
    threads[0].start()
    assert one.wait(10)
    threads[1].start()
    threads[0].join()
    done.set()
    threads[1].join()
    assert two.is_set() and torch.backends.mkldnn.enabled


def test_verbs_do_not_depend_on_the_default_device() -> None:
    """On "meta" they failed or, as `elbo`, gave another number; with "cuda", random numbers from a seed have none."""
    posterior, (x, _) = fitted(structure="full"), data()

    def answers() -> list[Tensor]:
        response, left_out = posterior.predict(x), posterior.remove([0]).predict(x)
        return [response.mean, response.variance, left_out.mean, posterior.elbo().value]

    expected = answers()
    with torch.device("meta"):
        found = answers()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_answers_do_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    """torch rounds the first point of a Sobol sequence to it: probabilities and `elbo` had half of their digits."""
    torch.manual_seed(0)
    x, (_, y) = data()[0], data()
    network, labels = nn.Linear(3, 3).double(), (y[:, 0] > 0).long()
    likelihood, before = ntkl.Categorical(), torch.get_default_dtype()

    def answers() -> list[Tensor]:
        posterior = ntkl.laplace(network, (x, labels), likelihood, ntkl.GaussianPrior(1.0), "full")
        return [posterior.predict(x).probs, posterior.predict(x.tolist()).probs, posterior.elbo().value]

    expected = answers()
    torch.set_default_dtype(dtype)
    try:
        found = answers()
    finally:
        torch.set_default_dtype(before)
    assert all(map(torch.equal, found, expected)) and torch.equal(found[0], found[1])


def test_one_thread_factorizes_after_a_change_of_hyperparameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them did, and threw away what another was about to use, which ended in an AssertionError."""
    posterior, (x, _), made = fitted(structure="full"), data(), list[int]()
    kind = type(posterior.fitted.structure)
    factorize = kind.posterior_precision

    def slowly(*arguments: Any) -> Any:
        made.append(1)
        threading.Event().wait(0.03)
        return factorize(*arguments)

    monkeypatch.setattr(kind, "posterior_precision", slowly)
    posterior.prior.log_precision.data += 1.0
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: posterior.predict(x).variance, range(4)))
    assert len(made) == 1 and all(torch.equal(one, found[0]) for one in found)


def test_a_writer_is_alone():
    """It waits for readers that are inside, and those that come later wait for it; readers do not wait for readers."""
    lock, order, inside = ReadersAndWriters(), list[str](), threading.Event()
    waits, ends = threading.Event(), threading.Event()

    def write() -> None:
        waits.set()
        with lock.writing():
            order.append("writes")
            inside.set()
            ends.wait(10.0)
            order.append("has written")

    def read() -> None:
        with lock.reading():
            order.append("reads")

    writer, reader = threading.Thread(target=write), threading.Thread(target=read)
    with lock.reading():
        first = threading.Thread(target=read)
        first.start()
        first.join(10.0)
        writer.start()
        assert waits.wait(10.0) and not inside.wait(0.05)
        order.append("has read")
    assert inside.wait(10.0)
    reader.start()
    reader.join(0.05)
    ends.set()
    for thread in (writer, reader):
        thread.join(10.0)
    assert order == ["reads", "has read", "writes", "has written", "reads"]


def test_readers_that_write_wait_for_each_other_and_nest():
    """Each in the middle of reading: none counts as a reader while it waits, so that both get their turn."""
    lock, together, done = ReadersAndWriters(), threading.Barrier(2), list[int]()

    def both(number: int) -> None:
        with lock.reading(), lock.reading():
            together.wait(10.0)
            with lock.writing(), lock.reading(), lock.writing():
                done.append(number)
            with lock.reading():
                done.append(number)

    threads = [threading.Thread(target=both, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert sorted(done) == [0, 0, 1, 1]


class Setting:
    """Changed for the whole process in a block."""

    changed = False

    @contextmanager
    def change(self) -> Iterator[None]:
        before = self.changed
        try:
            self.changed = True
            yield
        finally:
            self.changed = before


BLOCKS: dict[str, Callable[[ReadersAndWriters, ProcessWide], AbstractContextManager[None]]] = {
    "reads": lambda lock, _: lock.reading(), "writes": lambda lock, _: lock.writing(),
    "changes a setting": lambda _, wide: wide.entered(),
}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked on Windows")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python 3.12: a process with threads is forked
@pytest.mark.parametrize("block", BLOCKS)
def test_a_forked_process_waits_for_no_thread_of_the_first(block: str) -> None:
    """It waited for ever for a thread that it does not have, whose setting it kept, or the weights it had put in."""
    setting, lock, inside, done = Setting(), ReadersAndWriters(), threading.Event(), threading.Event()
    wide = ProcessWide(setting.change)

    def hold() -> None:
        with BLOCKS[block](lock, wide):
            setting.changed = setting.changed or block == "writes"
            inside.set()
            done.wait(0.1 if block == "writes" else 10.0)  # a fork waits for a writer
            setting.changed = setting.changed and block != "writes"

    holding = threading.Thread(target=hold)
    holding.start()
    assert inside.wait(10.0)
    if (child := os.fork()) == 0:
        signal.alarm(2)  # ends a process that waits
        with lock.reading(), lock.writing():
            os._exit(setting.changed)
    done.set()
    holding.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked on Windows")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_keeps_nothing_while_it_waits_for_a_writer() -> None:
    """A writer that asked for another object waited for the fork, which waited for the writer, ten seconds long."""
    held, others, inside, left = ReadersAndWriters(), [ReadersAndWriters() for _ in range(20)], threading.Event(), []

    def hold() -> None:
        with held.writing():
            inside.set()
            threading.Event().wait(0.05)
            for other in others:
                with other.reading():
                    pass
            left.append(True)

    holding = threading.Thread(target=hold)
    holding.start()
    assert inside.wait(10.0)
    if (child := os.fork()) == 0:
        os._exit(not left)
    holding.join()
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked on Windows")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_while_another_thread_makes_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of them changed size meanwhile, and the fork waited for none."""
    errors, done, interval = list[Any](), threading.Event(), sys.getswitchinterval()
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    kept = [ReadersAndWriters() for _ in range(1000)]

    def make() -> None:
        while not done.is_set():
            kept.append(ReadersAndWriters())

    making = threading.Thread(target=make)
    making.start()
    sys.setswitchinterval(1e-6)
    try:
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
    finally:
        sys.setswitchinterval(interval)
        done.set()
        making.join()
    assert not errors


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="Windows has no timer that interrupts")
@pytest.mark.parametrize("block", BLOCKS)
def test_an_interrupt_leaves_nothing_behind(block: str) -> None:
    """One in a hundred left a reader behind, for whom each writer of another thread waited for ever."""
    setting, lock, ready = Setting(), ReadersAndWriters(), False
    wide = ProcessWide(setting.change)

    def interrupt(*_: object) -> None:
        if ready:
            raise KeyboardInterrupt

    rng, before = random.Random(0), signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(1000):
            with suppress(KeyboardInterrupt):
                ready = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 5e-5))
                for _ in range(100):
                    with BLOCKS[block](lock, wide), lock.reading():
                        pass
            ready = False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with wide.entered():
        writer = threading.Thread(target=lambda: lock.writing().__enter__(), daemon=True)
        writer.start()
        writer.join(5.0)
    assert not writer.is_alive() and not setting.changed


def fit_of_an_estimator(wait: Callable[[], object]) -> None:
    x, Meeting.waits[threading.get_ident()] = torch.randn(12, 2).numpy(), wait
    ntkl.LaplaceRegressor(Meeting(nn.Linear(2, 1)), epochs=1, precision=1.0).fit(x, x[:, 0])


def many_weights(wait: Callable[[], object]) -> None:
    x, network = torch.randn(3, 2), Network(Meeting(nn.Linear(2, 1)))
    network.follows_gradients(x)
    Meeting.waits[threading.get_ident()] = wait
    ManyWeights(network, x)


@pytest.mark.filterwarnings("ignore:noise is not at the optimum", "ignore:precision")
@pytest.mark.parametrize("run", [fit_of_an_estimator, many_weights])
def test_filters_of_warnings_are_as_they_were(run: Callable[[Callable[[], object]], None]) -> None:
    """The first of two threads ends while the second one is inside: all later warnings of the process were lost."""
    run(lambda: None)  # imports add filters
    inside, ended, before = threading.Event(), threading.Event(), warnings.filters[:]
    thread = threading.Thread(target=run, args=(lambda: inside.set() or ended.wait(10.0),))
    run(lambda: thread.start() or inside.wait(10.0))
    ended.set()
    thread.join()
    assert warnings.filters == before
