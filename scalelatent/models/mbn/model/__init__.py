"""Bootstrap networks as mathematics: layers, sampling, the output, the compressive network."""
