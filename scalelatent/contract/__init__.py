"""What a model is to the engine: learners, statistics, and the table of model kinds."""
