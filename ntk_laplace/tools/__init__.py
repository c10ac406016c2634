"""Tools on top of the public interface: comparisons, reports, the explorer's page, the demo, the command."""
