"""What a run tells while it runs: live progress, and the metrics and event logs of the run folder."""
