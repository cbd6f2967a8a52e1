"""Base classes of the scikit-learn estimators. Each estimator itself is in the folder of its model."""
