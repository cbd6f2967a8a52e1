"""Job file to run: spec, run folder, runner, submit, control, demo."""
