"""Job file to run: spec, run folder, runner, doctor, demo."""
