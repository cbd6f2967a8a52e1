"""Mixtures of linear models as mathematics: scores, EM, stepwise EM, start, tangents, recognition."""
