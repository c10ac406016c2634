"""neural-tangents' empirical NTK (JAX): called by gram.py with the JAX interpreter.

usage: _peer_neural_tangents.py input.npz output.npz --case mlp|cnn|resnet [--repeats 5]
The networks are written in plain ``jax.lax`` with the weights of the torch networks, so the Grams agree to
rounding; ``empirical_ntk_fn`` differentiates any such function. Full outputs: ``trace_axes=()``. Compilation is
not counted. Input: ``net/*``, ``x``. Output: seconds, the Gram of the first 8 examples in interleaved order.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import neural_tangents as nt
import numpy as np
from jax import lax

Parameters = dict[str, Any]


def linear(p: Parameters, name: str, x: jax.Array) -> jax.Array:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def conv(p: Parameters, name: str, x: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    y = lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), [(padding, padding)] * 2)
    bias = p.get(f"{name}.bias")
    return y if bias is None else y + bias[None, :, None, None]


def pool(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")


def norm(p: Parameters, buffers: Parameters, name: str, x: jax.Array) -> jax.Array:
    scale = 1.0 / np.sqrt(buffers[f"{name}.running_var"] + 1e-5)
    x = (x - buffers[f"{name}.running_mean"][None, :, None, None]) * scale[None, :, None, None]
    return x * p[f"{name}.weight"][None, :, None, None] + p[f"{name}.bias"][None, :, None, None]


def mlp(p: Parameters, x: jax.Array) -> jax.Array:
    x = jax.nn.relu(linear(p, "0", x))
    return linear(p, "4", jax.nn.relu(linear(p, "2", x)))


def cnn(p: Parameters, x: jax.Array) -> jax.Array:
    x = pool(jax.nn.relu(conv(p, "0", x)))
    x = pool(jax.nn.relu(conv(p, "3", x)))
    return linear(p, "9", jax.nn.relu(linear(p, "7", x.reshape(x.shape[0], -1))))


def resnet(buffers: Parameters) -> Callable[[Parameters, jax.Array], jax.Array]:
    def block(p: Parameters, name: str, x: jax.Array, stride: int) -> jax.Array:
        y = jax.nn.relu(norm(p, buffers, f"{name}.norm1", conv(p, f"{name}.conv1", x, stride, 1)))
        y = norm(p, buffers, f"{name}.norm2", conv(p, f"{name}.conv2", y, 1, 1))
        return jax.nn.relu(y + (conv(p, f"{name}.shortcut", x, stride) if stride > 1 else x))

    def apply(p: Parameters, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(norm(p, buffers, "1", conv(p, "0", x, 1, 1)))
        x = block(p, "5", block(p, "4", block(p, "3", x, 1), 2), 2)
        return linear(p, "8", x.mean((2, 3)))

    return apply


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("source")
    arguments.add_argument("target")
    arguments.add_argument("--case", required=True)
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    with np.load(options.source) as found:
        arrays = dict(found)
    state = {k[4:]: v for k, v in arrays.items() if k.startswith("net/")}
    buffers = {k: v for k, v in state.items() if "running_" in k or "num_batches" in k}
    # linear weights as (i, o): a transpose inside the function costs its structured rules, and a factor of 60
    parameters = {k: jnp.asarray(v.T if v.ndim == 2 else v) for k, v in state.items() if k not in buffers}
    function = {"mlp": mlp, "cnn": cnn, "resnet": resnet(buffers)}[options.case]
    x = jnp.asarray(arrays["x"])

    result: dict[str, Any] = {}
    for kind in ("STRUCTURED_DERIVATIVES", "JACOBIAN_CONTRACTION"):
        kernel = jax.jit(
            nt.empirical_ntk_fn(function, trace_axes=(), vmap_axes=0, implementation=nt.NtkImplementation[kind])
        )
        gram = kernel(x, None, parameters).block_until_ready()  # compiles
        best = float("inf")
        for _ in range(options.repeats):
            start = time.perf_counter()
            gram = kernel(x, None, parameters).block_until_ready()
            best = min(best, time.perf_counter() - start)
        result[kind.lower()] = best
        corner = np.asarray(gram[:8, :8]).transpose(0, 2, 1, 3)  # (N, N, C, C) -> interleaved
        result["corner"] = corner.reshape(corner.shape[0] * corner.shape[1], -1)
        if options.case == "mlp":
            break  # a contraction of dense Jacobians needs over a minute here; it is the row beside it
    np.savez(options.target, **result)


if __name__ == "__main__":
    main()
