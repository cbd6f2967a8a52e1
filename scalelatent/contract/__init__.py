"""The interface between models and the engine: learners, statistics, and the table of model kinds."""
