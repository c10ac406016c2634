"""The demo: three real and two toy problems, from data to a report, with the public interface only."""

from ntk_laplace.tools.demo.run import run_demo

__all__ = ["run_demo"]
