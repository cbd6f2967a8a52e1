"""Capsule regression as mathematics: EM, stepwise, incremental and passive-aggressive learning."""
