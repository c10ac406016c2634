"""Agreement of several processes on parameter blocks, and the totals of their sums."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ntk_laplace.curvature import ParameterBlock, Summary, diagonal_block
from ntk_laplace.errors import UnsupportedError
from ntk_laplace.structures.model import LinearizedModel


def agreed_blocks(model: LinearizedModel, found: list[ParameterBlock], kind: str) -> list[ParameterBlock]:
    """Parameter blocks for all processes: those of rank 0's first batch, then what the others' first batches add.

    Raises
    ------
    UnsupportedError
        If the Kronecker factors would depend on how the data are shared.
    """
    reducer = model.settings.reducer
    if reducer.world_size == 1:
        return found
    shares = reducer.gather(found)
    names = [_names(blocks) for blocks in shares]
    everywhere = names[0].intersection(*names)
    late = sorted(names[0].union(*names) - everywhere)
    if late and kind != "diagonal":
        raise unreached(late, "processes whose first batch does not reach them")
    agreed: list[ParameterBlock] = []
    for blocks in shares:
        known = _names(agreed)
        whole = [block for block in blocks if not set(block.names) & known]
        agreed += whole + plain_blocks(_names(blocks) - known - _names(whole), model)
    return [_on(block, model.network.device) for block in agreed]


def total(
    model: LinearizedModel, blocks: Sequence[ParameterBlock], summaries: list[Summary],
    names: Container[str] | None = None,
) -> list[Summary]:
    """The sums of all processes; a block or a sum that a process never met is zero there.

    Parameters
    ----------
    model : LinearizedModel
    blocks : sequence of ParameterBlock
    summaries : list of Summary
    names : container of str, optional
        Only these sums of Kronecker blocks are added up; the others are equal on all processes. By default all.

    Raises
    ------
    UnsupportedError
        If two processes reached a parameter after their first batches, in different operations.
    """
    reducer, device = model.settings.reducer, model.network.device
    if reducer.world_size == 1:
        return summaries
    own = {_key(summary.block): summary.sums for summary in summaries}
    parts = {key: _part(key, sums, names) for key, sums in own.items()}
    forms = {key: {name: (value.shape, value.dtype) for name, value in sums.items()} for key, sums in parts.items()}
    shares = reducer.gather((list(blocks), forms))
    found = []
    for key, block in _union([theirs for theirs, _ in shares]).items():
        wanted = {name: form for _, theirs in shares for name, form in theirs.get(key, {}).items()}
        known = parts.get(key, {})
        sums = {
            name: known[name] if name in known else torch.zeros(shape, dtype=dtype, device=device)
            for name, (shape, dtype) in sorted(wanted.items())
        }
        reducer.sum_(*sums.values())
        found.append(Summary(_on(block, device), own.get(key, {}) | sums))
    return found


def joined_summaries(shares: Sequence[list[Summary]], names: Container[str] | None = None) -> list[Summary]:
    """The sums of the files of several processes; `names` as in `total`."""
    found = []
    for key, block in _union([[summary.block for summary in share] for share in shares]).items():
        same = [summary.sums for share in shares for summary in share if _key(summary.block) == key]
        sums = dict(same[0])
        for other in same[1:]:
            for name, value in _part(key, other, names).items():
                sums[name] = sums[name] + value if name in sums else value
        found.append(Summary(block, sums))
    return found


def without_own(summaries: Sequence[Summary], names: Container[str] | None = None) -> list[Summary]:
    """The summaries without the sums that processes add up; `names` as in `total`."""
    found = []
    for summary in summaries:
        own = _part(_key(summary.block), summary.sums, names)
        found.append(Summary(summary.block, {name: v for name, v in summary.sums.items() if name not in own}))
    return found


def _part(key: tuple, sums: Mapping[str, Tensor], names: Container[str] | None) -> dict[str, Tensor]:
    """The sums that processes add up."""
    if names is None:
        return dict(sums)
    return {name: value for name, value in sums.items() if key[0] == "kronecker" and name in names}


def plain_blocks(names: Container[str], model: LinearizedModel) -> list[ParameterBlock]:
    """A diagonal block for each of these parameters, in the order of the network."""
    sizes = {name: shape.numel() for name, shape in model.network.shapes.items()}
    return [diagonal_block(name, size) for name, size in sizes.items() if size and name in names]


def unreached(names: Sequence[str], got: str) -> UnsupportedError:
    """The error of parameters that not every batch reaches."""
    return UnsupportedError(f"every batch to reach {', '.join(names[:3])}", got,
                            'Use structure="diag", "full" or "gp", which follow any graph, or larger batches.')


def _union(shares: Sequence[Sequence[ParameterBlock]]) -> dict[tuple, ParameterBlock]:
    """Blocks of all processes by key, in the order of the ranks."""
    found: dict[tuple, ParameterBlock] = {}
    for blocks in shares:
        added = {_key(block): block for block in blocks if _key(block) not in found}
        clash = sorted(_names(added.values()) & _names(found.values()))
        if clash:
            raise unreached(clash, "processes that reach them late, in different operations")
        found |= added
    return found


def _names(blocks: Iterable[ParameterBlock]) -> set[str]:
    return {name for block in blocks for name in block.names}


def _key(block: ParameterBlock) -> tuple:
    return block.kind, block.names, block.entries, block.group


def _on(block: ParameterBlock, device: torch.device) -> ParameterBlock:
    return block if block.index is None else replace(block, index=block.index.to(device))
