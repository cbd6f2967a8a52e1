"""Learning and inference of hierarchical compositional networks."""
