"""Mathematics of mixtures of linear models: scores, EM, stepwise EM, start values, tangents, recognition."""
