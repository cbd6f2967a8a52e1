"""
Topics of documents
===================

This example is for readers who group texts. It generates documents from known topics, and compares a
:class:`~scalelatent.MultilayerBootstrapNetwork` on sparse counts with latent semantic analysis (LSA).
"""

# %%
# Documents
# ---------
# Each of twelve topics prefers other words of a vocabulary of 1,000. Half of the words of a document come
# from its topic, the others from all topics. The counts stay sparse from here to the result.

import matplotlib.pyplot as plt
import numpy as np
import scipy.sparse as sp
from sklearn.cluster import KMeans
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfTransformer
from sklearn.pipeline import make_pipeline

import scalelatent as sl
from scalelatent.data import make_documents
from scalelatent.evaluation import nmi

rng = np.random.default_rng(0)
n_topics, n_words = 12, 1000
words = rng.dirichlet(np.full(n_words, 0.05), n_topics)
common = rng.dirichlet(np.full(n_words, 0.3))
topics = np.arange(600) % n_topics
counts = np.stack([rng.multinomial(80, 0.35 * words[t] + 0.65 * common) for t in topics])
base = sl.Dataset.from_arrays(sp.csr_array(counts), topics).save("memory://base-documents", overwrite=True)
documents = make_documents("memory://documents", 4000, base=base.url, overwrite=True)
print(documents)

# %%
# Cluster
# -------
# ``metric="cosine"`` ignores the lengths of documents.

network = sl.MultilayerBootstrapNetwork(
    n_clusterings=100, k1=400, metric="cosine", n_classes=n_topics, n_components=n_topics, random_state=0
)
x, y = documents.read_x(0, 4000), documents.read_y(0, 4000)
lsa = make_pipeline(TfidfTransformer(sublinear_tf=True), TruncatedSVD(n_topics, random_state=0))
outputs = {"bootstrap network": network.fit_transform(documents), "LSA": lsa.fit_transform(x)}
scores = {}
for name, output in outputs.items():
    clusters = KMeans(n_topics, n_init=5, random_state=0).fit_predict(output)
    scores[name] = nmi(y, clusters), clusters
    print(f"{name:18} NMI {scores[name][0]:.2f}")

# %%
# The table states which of the two is better here. On real news LSA with as many components as topics was
# better than the network (:doc:`benchmarks </how/benchmarks>`). Try LSA first, as long as the counts fit
# in memory.
#
# See
# ---
# Each row of the matrix is a topic, each column a cluster. One dark field per row is the ideal.

figure, axes = plt.subplots(1, 2, figsize=(7.5, 3.6))
for axis, (name, (score, clusters)) in zip(axes, scores.items(), strict=True):
    table = np.zeros((n_topics, n_topics))
    np.add.at(table, (y, clusters), 1)
    order = np.argsort(table.argmax(axis=0), kind="stable")
    axis.imshow(table[:, order] / table.sum(axis=1, keepdims=True), cmap="Blues", vmin=0, vmax=1)
    axis.set(title=f"{name}: NMI {score:.2f}", xlabel="cluster", ylabel="topic", xticks=[], yticks=[])
plt.show()
