"""Run jobs from job files: spec, run folder, runner, submit, control, demo."""
