"""Retraining with a user-defined function, the ground truth of attribution; resumable and parallel."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from ntk_laplace.errors import DataError, UnsupportedError, is_whole
from ntk_laplace.runtime.progress import track

Train = Callable[[NDArray[np.int64], int], ArrayLike]


def random_halves(count: int, num_examples: int, seed: int = 1000) -> NDArray[np.bool_]:
    """Masks of random halves of the training points, (count, N); half s uses the random seed `seed` + s."""
    if not is_whole(count, 1) or not is_whole(num_examples, 2):
        raise DataError("at least one half of at least two points", f"{count!r} of {num_examples!r}", "Ask for more.")
    kept = np.zeros((count, num_examples), dtype=bool)
    for number in range(count):
        drawn = np.random.default_rng(seed + number).choice(num_examples, num_examples // 2, replace=False)
        kept[number, drawn] = True
    return kept


def without_each_in_turn(indices: Iterable[int], num_examples: int) -> NDArray[np.bool_]:
    """Masks of all training points except one, for each of `indices`, (m, N)."""
    given = list(indices) if isinstance(indices, Iterable) else [indices]
    if not given or not all(is_whole(index, 0) and index < num_examples for index in given):
        raise DataError(f"training points from 0 to {num_examples - 1}", f"{given[:5]} ...", "Pass their numbers.")
    indices = np.asarray(given, dtype=np.int64)
    kept = np.ones((len(indices), num_examples), dtype=bool)
    kept[np.arange(len(indices)), indices] = False
    return kept


def retrain(
    train: Train, kept: ArrayLike, seeds: Sequence[int] = (0,), *, folder: str | os.PathLike[str] | None = None,
    processes: int = 1, progress: bool | None = None,
) -> NDArray[np.float64]:
    """Outcomes of training on subsets of the data with several random seeds.

    Parameters
    ----------
    train : callable
        ``train(indices, seed)``, with the ascending indices of the training points to use. It returns the outcomes, an
        array of the same shape for all subsets, such as the loss at each test point. Train to convergence: with
        optimizer noise the scores of attribution methods become indistinguishable.
    kept : array_like of bool, (M, N)
        Which training points are in each subset.
    seeds : sequence of int
    folder : path, optional
        Every outcome is written to this folder when it is computed. A later call with the same subsets continues from
        the stored outcomes.
    processes : int
        Above 1, `train` runs in this many new processes with one thread each; it must be a function of an importable
        module.
    progress : bool, optional
        Show a progress bar; by default if the error stream is a terminal.

    Returns
    -------
    array, (S, M, ...)

    Raises
    ------
    DataError
        If a subset is empty, the folder contains other subsets, or outcomes differ in shape.
    UnsupportedError
        If `train` cannot be sent to another process.
    """
    kept, seeds = np.asarray(kept, dtype=bool), list(seeds) if isinstance(seeds, Iterable) else [seeds]
    enough = is_whole(processes, 1) and len(seeds) > 0 and all(is_whole(seed, 0) for seed in seeds)
    if kept.ndim != 2 or not kept.any(1).all() or not enough:
        raise DataError("masks of non-empty subsets (M, N), one seed and one process at least",
                        f"shape {kept.shape}, seeds {seeds[:5]}, {processes!r} processes", "See random_halves.")
    if not callable(train):
        raise UnsupportedError("a function train(indices, seed) that returns outcomes", f"{train!r}"[:80],
                               "Define one that trains and evaluates.")
    store = None if folder is None else _Store(Path(folder), kept)
    jobs = [(int(seed), number) for seed in seeds for number in range(len(kept))]
    found = {} if store is None else {job: outcome for job in jobs if (outcome := store.read(job)) is not None}
    missing = [job for job in jobs if job not in found]
    one_by_one = ((job, train(np.flatnonzero(kept[job[1]]), job[0])) for job in missing)
    run = one_by_one if processes == 1 else _in_parallel(train, kept, missing, processes)
    for job, new in track(run, "ntk_laplace: retraining", len(missing), progress):
        found[job] = np.asarray(new, dtype=np.float64)
        if store is not None:
            store.write(job, found[job])
    shapes = {outcome.shape for outcome in found.values()}
    if len(shapes) != 1:
        raise DataError("outcomes of one shape", f"{sorted(shapes)}", "Evaluate every model at the same test points.")
    return np.stack([np.stack([found[int(seed), number] for number in range(len(kept))]) for seed in seeds])


Job = tuple[int, int]


def _in_parallel(
    train: Train, kept: NDArray[np.bool_], jobs: list[Job], processes: int
) -> Iterator[tuple[Job, ArrayLike]]:
    try:
        pickle.dumps(train)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UnsupportedError("a function of an importable module, to run it in other processes", f"{error}",
                               "Define it at the top of a separate file, or use processes=1.") from error
    fresh = multiprocessing.get_context("spawn")  # a fork of a process with torch's threads may hang
    with ProcessPoolExecutor(processes, mp_context=fresh, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        waiting = {pool.submit(train, np.flatnonzero(kept[number]), seed): (seed, number) for seed, number in jobs}
        try:
            for future in as_completed(waiting):
                yield waiting[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


class _Store:
    """Outcomes on disk, one file each; a fingerprint of the subsets detects other experiments."""

    def __init__(self, folder: Path, kept: NDArray[np.bool_]) -> None:
        self.folder = folder
        self.folder.mkdir(parents=True, exist_ok=True)
        mark = {"shape": list(kept.shape), "subsets": hashlib.sha256(np.packbits(kept).tobytes()).hexdigest()}
        file = self.folder / "subsets.json"
        if file.exists() and json.loads(file.read_text()) != mark:
            raise DataError("a folder of outcomes of the same subsets", f"another experiment in {self.folder}",
                            "Choose another folder.")
        file.write_text(json.dumps(mark))

    def read(self, job: Job) -> NDArray[np.float64] | None:
        file = self._file(job)
        return np.load(file, allow_pickle=False) if file.exists() else None

    def write(self, job: Job, outcome: NDArray[np.float64]) -> None:
        file = self._file(job)
        partial = file.with_suffix(".part")
        with partial.open("wb") as stream:
            np.save(stream, outcome, allow_pickle=False)
        partial.replace(file)  # atomic: a reader never sees a partial file

    def _file(self, job: Job) -> Path:
        return self.folder / f"seed{job[0]}-subset{job[1]}.npy"
