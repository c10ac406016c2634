"""Tools on top of the public interface: comparisons, attributions against retraining, reports, pages, the command."""
