"""Reports of runs: one self-contained HTML page with figures, and comparisons of several runs."""
