"""Private names of the library in tests: each has its reason here, and no other is used."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
# Constants in capitals are sizes of buffers. Tests make them small, so that a small problem has many pieces. A public
# setting for each would be one more thing that a user could get wrong.
PRIVATE = {
    "_fused_layers": "made wrong, to see that the check against autograd notices",
    "_addmm": "a rule made wrong, to see that the check against autograd notices",
    "_jobs": "which contraction is chosen for a pair of blocks: all give the same Gram matrix",
    "_kept": "the kernel's cache, counted and emptied: the answers are the same",
    "_rows": "Jacobian blocks in the form that a precision takes; and the kernel's cache",
    "_newton_step": "the step in weights; the public mean is its product with the Jacobian",
    "_model": "the linearized model, which pieces below the posterior take as their argument",
    "_accumulated": "sums of parts of the data, compared to add up before anything is formed from them",
    "_sampler": "replaced, to read off the root of the covariance by unit vectors",
    "_repr_html_": "IPython's own name of a representation",
    "_Passing": "counts the inputs of each pass over the data: the ranking is the same with more passes",
    "_Strongest": "the bounded heap alone, against a full sort, with ties that no network gives",
    "_Search": "the criterion and the line search alone, on evidences that no network gives",
    "_tell": "interrupted, to see that the rows before it are kept",
    "_warm_up": "interrupted, to see that the rows before it are kept",
    "_measure": "interrupted, to see that the rows before it are kept",
    "_high_water_mark": "the operating system's answer, in bytes, and replaced by others",
    "_require_length": "the bound of a scheduler at its exact step, without a training of that length",
    "_basis": "directions that quasi-Newton steps remember, which must stay orthonormal",
    "_counts": "how many of them there are",
    "_batched": "a module of examples/uci",
    "_baselines": "a module of examples/predictions",
    "_scores": "a module of examples/predictions",
    "_summary": "a module of examples/predictions",
    "_samplers": "a module of examples/selection",
    "_summary_l22": "a module of examples/selection",
    "_in_sets": "a function of examples/predictions, beside its definition",
}
# torch's, NumPy's and pytest's own
FOREIGN = {
    "_backward_hooks", "_base", "_dynamo", "_forward_hooks", "_index_put_impl_", "_make_wrapper_subclass", "_schema",
    "_setup_privateuseone_for_python_backend", "_to_copy", "_version", "_C", "_input_metadata",
    "_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported", "_modules", "_backward_pre_hooks",
    "_local_scalar_dense", "_interleaved", "_exit",
}
# strings that only look like names
WORDS = {
    "_accuracy", "_behind", "_behind_error", "_build", "_deep", "_error", "_fit", "_log_likelihood",
    "_ntk_laplace_network_fails", "_ntk_laplace_network_net", "_only_new_objects", "_reverse",
}


def private_names(path: Path) -> Iterator[tuple[str, int]]:
    """Attributes other than those of self, imported names, and names given to monkeypatch as text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) not in ("self", "cls"):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value.rpartition(".")[2]] if re.fullmatch(r"([\w.]+\.)?_\w+", node.value) else []
        else:
            continue
        yield from ((name, node.lineno) for name in names if re.match("_[a-zA-Z]", name))


def test_private_names_have_a_reason() -> None:
    known = {*PRIVATE, *FOREIGN, *WORDS}
    files = [path for path in sorted(HERE.rglob("*.py")) if path != Path(__file__)]
    unknown = [
        f"{path.relative_to(HERE)}:{line} uses {name}: use what is public, or add it with the reason"
        for path in files for name, line in private_names(path) if name not in known and not name.isupper()
    ]
    assert unknown == []


def test_private_names_are_found(tmp_path: Path) -> None:
    file = tmp_path / "test_x.py"
    file.write_text('from a import _b\nc._d()\nself._e\nmonkeypatch.setattr("f._G", 1)\nsetattr(h, "_i", 2)\nx.__y__\n')
    assert sorted(private_names(file)) == [("_G", 4), ("_b", 1), ("_d", 2), ("_i", 5)]
