"""Predictions of fitted models as ONNX graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scalelatent.errors import DataError
from scalelatent.storage.disk import locate

if TYPE_CHECKING:
    import numpy.typing as npt
    import onnx

# Versions of the operator set and the file format; runtimes that are some years old can read them.
OPSET, IR_VERSION = 18, 9


class OnnxGraph:
    """ONNX graph under construction, from the input ``x``, float32 (n, features), to named outputs."""

    def __init__(self, n_features: int) -> None:
        try:
            import onnx
        except ImportError as error:
            raise DataError(
                "to_onnx needs a package that is not installed (onnx): pip install 'scalelatent[onnx]'"
            ) from error
        self._onnx = onnx
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self.x = "x"
        rows = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", n_features])
        self._inputs = [rows]

    def constant(self, value: npt.ArrayLike) -> str:
        """Add an array as a constant, with the dtype of the array; return its name in the graph."""
        name = f"c{len(self._constants)}"
        self._constants.append(self._onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add an operator ``kind``, such as "MatMul"; return the name of its result in the graph."""
        name = f"v{len(self._nodes)}"
        self._nodes.append(self._onnx.helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def cast(self, value: str, dtype: npt.DTypeLike) -> str:
        return self.node("Cast", value, to=self._type(dtype))

    def sum(self, value: str, axis: int) -> str:
        """Add the sum of ``value`` over an axis, which keeps length 1; return the name of the sum."""
        return self.node("ReduceSum", value, self.constant(np.array([axis])), keepdims=1)

    def output(self, name: str, value: str, dtype: npt.DTypeLike, shape: list[str | int]) -> None:
        self._nodes.append(self._onnx.helper.make_node("Identity", [value], [name]))
        self._outputs.append(self._onnx.helper.make_tensor_value_info(name, self._type(dtype), shape))

    def classes(self, values: str, classes: np.ndarray, name: str = "probabilities") -> None:
        """Add the outputs of a classifier: ``label``, the class of the largest value, and the values."""
        if classes.dtype.kind in "OUS":
            known = np.array([str(c) for c in classes.tolist()], dtype=object)
        else:
            known = classes.astype(np.int64 if classes.dtype.kind in "iu" else classes.dtype)
        best = self.node("ArgMax", values, axis=1, keepdims=0)
        label = self.node("Gather", self.constant(known), best, axis=0)
        self.output("label", label, known.dtype, ["rows"])
        self.output(name, self.cast(values, np.float32), np.float32, ["rows", len(classes)])

    def save(self, path: str | os.PathLike[str], doc: str) -> None:
        """Check the graph and write it to ``path``, a local path or an address."""
        from scalelatent import __version__

        graph = self._onnx.helper.make_graph(
            self._nodes, "scalelatent", self._inputs, self._outputs, self._constants, doc_string=doc
        )
        model = self._onnx.helper.make_model(
            graph,
            opset_imports=[self._onnx.helper.make_opsetid("", OPSET)],
            ir_version=IR_VERSION,
            producer_name="scalelatent",
            producer_version=__version__,
        )
        self._onnx.checker.check_model(model)
        url = os.fspath(path)
        folder, name = url.rsplit("/", 1) if "://" in url else (str(Path(url).parent), Path(url).name)
        locate(folder).write(name, model.SerializeToString())

    def _type(self, dtype: npt.DTypeLike) -> int:
        return int(self._onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))
