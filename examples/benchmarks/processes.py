"""Several processes beside one: time of fits, and fits of which one process is killed.

    python examples/benchmarks/processes.py
    python examples/benchmarks/processes.py --kill 50

Without ``--kill``: two processes of one thread against one process of one thread, over gloo. KFAC, EKFAC and the
diagonal of an MLP 784-512-256-10 (N=20,000), a whole fit; the Gram matrix and its Cholesky factor of structure "gp" of
an MLP 64-64-10 (N=900, B of 8,100 x 8,100). Evidence and predictive variances have to be equal. Both numbers of
processes take turns, and the shortest of ``--repeats`` turns counts. The load of the machine before is in the file:
other programs on the same cores make the wall's figures of two processes meaningless, and the processor's time of the
process that took most (waiting for the other aside) is the better one.

With ``--kill K``, K times: an EKFAC fit on two processes, of which one is killed (SIGKILL) at a random moment of a
pass; the seconds until the other says so; and the fit resumed with one, two and three processes in turn from the files
that are left, compared with an undisturbed one.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import machine, parser, seconds, table, write
from _processes import done, kill_one, result, start, timed

CASES = {"kfac": (20000, (784, 512, 256, 10)), "ekfac": (20000, (784, 512, 256, 10)),
         "diag": (20000, (784, 512, 256, 10)), "gp": (900, (64, 64, 10))}
SMALL = {"gp": (30, (8, 6, 3))}
GOALS = {"kfac": 1.8, "ekfac": 1.8, "diag": 1.8, "gp": 1.7}


def times(cases: dict[str, Any], repeats: int, folder: Path) -> dict[str, Any]:
    """Seconds with one and two processes, and the largest relative difference of their numbers."""
    found: dict[str, Any] = {}
    for structure, (n, widths) in cases.items():
        best = {1: float("inf"), 2: float("inf")}
        processor, numbers = dict(best), {}
        for _ in range(repeats):
            for ranks in best:
                out = folder / "timed.pt"
                for process in start(ranks, folder, timed, structure, n, widths, 2, out):
                    process.join()
                    assert process.exitcode == 0, process.exitcode
                own = torch.load(out)
                best[ranks] = min(best[ranks], own["seconds"])
                processor[ranks] = min(processor[ranks], own["processor"])
                numbers[ranks] = own["numbers"]
        gap = float(((numbers[1] - numbers[2]).abs() / numbers[1].abs()).max())
        found[structure] = {"one": best[1], "two": best[2], "times": best[1] / best[2], "difference": gap,
                            "processor": processor, "processor_times": processor[1] / processor[2]}
        print(f"{structure}: {best[1]:.3g} s, {best[2]:.3g} s", flush=True)
    return found


def kills(count: int, n: int, folder: Path, latest: float | None = None) -> dict[str, Any]:
    """Kill, wait, resume with 1, 2 and 3 processes in turn; how often all went well, and the longest wait."""
    before = time.perf_counter()
    (expected,) = result(1, folder, "ekfac", n)
    latest = 0.8 * (time.perf_counter() - before) if latest is None else latest
    equal, longest, gap, tries = 0, 0.0, 0.0, 0
    while tries < count:
        took = kill_one(folder, "ekfac", n, latest)
        if took is None:  # the fit had ended: most of that time was the start of the process
            latest *= 0.7
            continue
        tries += 1
        longest, left = max(longest, took), done(Path(folder))
        found = result(1 + tries % 3, folder, "ekfac", n, folder / "fit.pt")
        own = max(float(((one - expected) / expected).abs().max()) for one in found)
        gap, equal = max(gap, own), equal + (own < 1e-12 and took < 60.0)
        print(f"{tries}: {left} done, said so after {took:.2f} s, resumed with {1 + tries % 3}, difference {own:.1e}",
              flush=True)
    return {"kills": count, "equal": equal, "longest_wait": longest, "difference": gap}


def main() -> None:
    arguments = parser(__doc__, "processes.json")
    arguments.add_argument("--kill", type=int, default=0, metavar="K", help="kill a process K times")
    options = arguments.parse_args()
    found: dict[str, Any] = {"machine": machine(1)}
    with tempfile.TemporaryDirectory() as name:
        if options.kill:
            found["death"] = kills(options.kill, *((60, Path(name), 0.05) if options.small else (400, Path(name))))
            print(f"{found['death']['equal']} of {options.kill}: equal to an undisturbed fit; the longest wait for the "
                  f"error was {found['death']['longest_wait']:.2f} s")
        else:
            found["times"] = times(SMALL if options.small else CASES, options.repeats, Path(name))
            rows = [[name, seconds(own["one"]), seconds(own["two"]), f"{own['times']:.2f}x",
                     f"{own['processor_times']:.2f}x", f">= {GOALS[name]}x", f"{own['difference']:.1e}"]
                    for name, own in found["times"].items()]
            print(table(["structure", "one process", "two", "faster", "by processor time", "goal", "difference"], rows))
            print(f"load before: {found['machine']['load']}")
    write(options.out, found)


if __name__ == "__main__":
    main()
