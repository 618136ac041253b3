"""Writing ONNX graphs: values with the usual operators, weights, branches and loops.

    graph = Graph(opset=18)
    x = graph.input("x", "float", ["batch", 8])
    graph.output("y", graph.silu(x) * 2.0, ["batch", 8])
    model = graph.build("example", {"task": "none"})

Nodes come from our weights and not from a trace: the number of active tokens and the loop over blocks stay in the
graph, and what a runtime executes can be read here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

from seqboat.core.checks import require
from seqboat.inference.int8 import Int8Weight

Kind = Literal["float", "double", "int", "bool"]
KINDS: dict[str, tuple[int, Any]] = {
    "float": (TensorProto.FLOAT, np.float32),
    "double": (TensorProto.DOUBLE, np.float64),
    "int": (TensorProto.INT64, np.int64),
    "bool": (TensorProto.BOOL, np.bool_),
}
"""Types of ONNX and NumPy by the names that are used here."""

DEFAULT_OPSET = 18
"""Understood by onnxruntime 1.14 and later, and by its build for browsers."""
OLDEST = 14
"""The opset whose forms of the operators are used, unless `NEEDS` names a later one."""
NEEDS = {"LayerNormalization": 17, "BitwiseXor": 18, "ReduceLogSumExp": 18, "ReduceMean": 18}
"""Operators that came later, or in another form."""
IR_VERSION = 8
"""Version of the file format: the one of opset 18."""

COMPARISONS = ("Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal", "Not", "And", "IsNaN", "IsInf")
INTEGERS = ("Shape", "NonZero", "ArgMax")
Shape = Sequence[int | str] | None


class Value:
    """A tensor of a graph."""

    __array_ufunc__ = None

    def __init__(self, graph: Graph, name: str, kind: Kind) -> None:
        self.graph, self.name, self.kind = graph, name, kind

    def _with(self, operator: str, other: Value | float, swap: bool = False) -> Value:
        second = other if isinstance(other, Value) else self.graph.const(other, self.kind)
        pair = (second, self) if swap else (self, second)
        return self.graph.op(operator, *pair)

    def __add__(self, other: Value | float) -> Value:
        return self._with("Add", other)

    def __sub__(self, other: Value | float) -> Value:
        return self._with("Sub", other)

    def __rsub__(self, other: Value | float) -> Value:
        return self._with("Sub", other, swap=True)

    def __mul__(self, other: Value | float) -> Value:
        return self._with("Mul", other)

    def __truediv__(self, other: Value | float) -> Value:
        return self._with("Div", other)

    def __rtruediv__(self, other: Value | float) -> Value:
        return self._with("Div", other, swap=True)

    def __floordiv__(self, other: Value | int) -> Value:
        """Division of integers that are not negative."""
        return self._with("Div", other)

    def __mod__(self, other: Value | float) -> Value:
        second = other if isinstance(other, Value) else self.graph.const(other, self.kind)
        return self.graph.op("Mod", self, second, fmod=0 if self.kind == "int" else 1)

    def __matmul__(self, other: Value) -> Value:
        return self._with("MatMul", other)

    def __and__(self, other: Value) -> Value:
        return self._with("And", other)

    def __lt__(self, other: Value | float) -> Value:
        return self._with("Less", other)

    def __le__(self, other: Value | float) -> Value:
        return self._with("LessOrEqual", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._with("Greater", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._with("GreaterOrEqual", other)

    def equals(self, other: Value | float) -> Value:
        return self._with("Equal", other)

    def to(self, kind: Kind) -> Value:
        return self if kind == self.kind else self.graph.op("Cast", self, kind=kind, to=KINDS[kind][0])

    def reshape(self, *sizes: int | Value) -> Value:
        return self.graph.op("Reshape", self, self.graph.sizes(sizes))

    def expand(self, *sizes: int | Value) -> Value:
        return self.graph.op("Expand", self, self.graph.sizes(sizes))

    def transpose(self, *order: int) -> Value:
        return self.graph.op("Transpose", self, perm=list(order))

    def unsqueeze(self, *axes: int) -> Value:
        return self.graph.op("Unsqueeze", self, self.graph.const(list(axes), "int"))

    def squeeze(self, *axes: int) -> Value:
        return self.graph.op("Squeeze", self, self.graph.const(list(axes), "int"))

    def sum(self, axis: int, keep: bool = False) -> Value:
        return self.graph.op("ReduceSum", self, self.graph.const([axis], "int"), keepdims=int(keep))

    def take(self, index: Value | int | Sequence[int], axis: int = 0) -> Value:
        """Entries along an axis, in the shape of the index."""
        index = index if isinstance(index, Value) else self.graph.const(index, "int")
        return self.graph.op("Gather", self, index, axis=axis)

    def cut(self, begin: int, end: int | Value, axis: int) -> Value:
        """The part from `begin` on, up to `end`."""
        graph = self.graph
        last = end.reshape(1) if isinstance(end, Value) else graph.const([end], "int")
        return graph.op("Slice", self, graph.const([begin], "int"), last, graph.const([axis], "int"))

    def split(self, sizes: Sequence[int], axis: int = -1) -> tuple[Value, ...]:
        lengths = self.graph.const(list(sizes), "int")
        return self.graph.ops("Split", [self, lengths], [self.kind] * len(sizes), axis=axis)

    def size(self, axis: int) -> Value:
        """The size of an axis, as a number of the graph."""
        return self.graph.op("Shape", self).take(axis)

    def clip(self, low: float, high: float) -> Value:
        graph = self.graph
        return graph.op("Clip", self, graph.const(low, self.kind), graph.const(high, self.kind))


class Graph:
    """Collects the nodes, weights, inputs and outputs of a model.

    Args:
        opset: version of the operators.
    """

    def __init__(self, opset: int = DEFAULT_OPSET) -> None:
        self.opset = opset
        self.nodes: list[onnx.NodeProto] = []
        self._root = self.nodes
        """nodes outside all branches"""
        self._made: dict[Any, Value] = {}
        """what was made there from inside a branch"""
        self.used: set[str] = set()
        """kinds of nodes"""
        self.tensors: dict[str, onnx.TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self._known: dict[Any, Value] = {}
        self._sources: list[Tensor] = []
        """parameters that were stored: kept, so that their addresses stay taken"""
        self._given: set[str] = set()
        """results that have the name of an output"""
        self._count = 0

    # inputs, outputs, weights

    def input(self, name: str, kind: Kind, shape: Shape) -> Value:
        """A tensor that the caller gives; named sizes are free."""
        self.inputs.append(helper.make_tensor_value_info(name, KINDS[kind][0], shape))
        return Value(self, name, kind)

    def output(self, name: str, value: Value, shape: Shape) -> None:
        """Name a result."""
        if not self._rename(value.name, name):
            self._node("Identity", [value.name], [name])
        self.outputs.append(helper.make_tensor_value_info(name, KINDS[value.kind][0], shape))

    def _rename(self, old: str, new: str) -> bool:
        """Give the result of a node another name: a node that copies it would cost time at every step."""
        made = [node for node in self.nodes if old in node.output]
        if not made or old in self._given:
            return False
        self._given.add(new)
        made[0].output[list(made[0].output).index(old)] = new
        replace_inputs(self.nodes, old, new)
        return True

    def const(self, value: Any, kind: Kind) -> Value:
        """A small constant; equal ones are stored once."""
        array = np.asarray(value, KINDS[kind][1])
        key = (kind, array.shape, array.tobytes())
        if key not in self._known:
            self._known[key] = self._store(self._name("const"), array, kind)
        return self._known[key]

    def weight(self, value: Tensor, name: str = "weight") -> Value:
        """A parameter, in float32; one that is used twice is stored once."""
        key = ("weight", value.data_ptr(), tuple(value.shape), value.dtype, tuple(value.stride()))
        if key not in self._known or not value.numel():
            found = self._store(self._name(name), value.detach().float().cpu().numpy(), "float")
            self._known[key] = found
            self._sources.append(value)
        return self._known[key]

    def matrix(self, layer: nn.Module, name: str) -> Value:
        """The matrix of a linear layer or an embedding.

        int8 codes are multiplied by their scales in the graph, outside all branches: a runtime does it once when it
        loads the file. It would repeat a DequantizeLinear at every step.
        """
        if not isinstance(layer, Int8Weight):
            return self.weight(layer.weight, name)  # type: ignore[arg-type]
        key = ("codes", id(layer))
        if key not in self._known:
            codes, scale = self.codes(layer, name)
            inner, self.nodes = self.nodes, self._root
            self._known[key] = self._made[key] = codes.to("float") * scale.unsqueeze(1)
            self.nodes = inner
        return self._known[key]

    def rows(self, layer: nn.Module, places: Value, name: str) -> Value:
        """(..., columns): some rows of the matrix of an embedding, by their numbers (...)."""
        if not isinstance(layer, Int8Weight):
            return self.weight(layer.weight, name).take(places)  # type: ignore[arg-type]
        codes, scale = self.codes(layer, name)
        return codes.take(places).to("float") * scale.take(places).unsqueeze(-1)

    def codes(self, layer: Int8Weight, name: str) -> tuple[Value, Value]:
        """The int8 codes of a layer and the scale of every row."""
        key = ("int8", id(layer))
        if key not in self._known:
            found = self._store(self._name(name + ".codes"), layer.codes.cpu().numpy(), "int")
            self._known[key] = found
        return self._known[key], self.weight(layer.scale, name + ".scale")

    def _store(self, name: str, array: np.ndarray[Any, Any], kind: Kind) -> Value:
        self.tensors[name] = numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        return Value(self, name, kind)

    def _name(self, stem: str) -> str:
        self._count += 1
        return f"{stem}_{self._count}"

    # nodes

    def _node(self, operator: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> None:
        self.used.add(operator)
        self.nodes.append(helper.make_node(operator, list(inputs), list(outputs), **attributes))

    def op(self, operator: str, *inputs: Value, kind: Kind | None = None, **attributes: Any) -> Value:
        """A node with one result, of the type of its first input unless the operator says otherwise."""
        if kind is None:
            kind = inputs[1].kind if operator == "Where" else inputs[0].kind
            kind = "bool" if operator in COMPARISONS else "int" if operator in INTEGERS else kind
        return self.ops(operator, inputs, [kind], **attributes)[0]

    def ops(
        self, operator: str, inputs: Sequence[Value], kinds: Sequence[Kind], **attributes: Any
    ) -> tuple[Value, ...]:
        """A node with several results."""
        names = [self._name(operator.lower()) for _ in kinds]
        self._node(operator, [value.name for value in inputs], names, **attributes)
        return tuple(Value(self, name, kind) for name, kind in zip(names, kinds, strict=True))

    def sizes(self, sizes: Sequence[int | Value]) -> Value:
        """A shape from numbers, known ones and those of the graph."""
        if all(isinstance(size, int) for size in sizes):
            return self.const(list(sizes), "int")
        parts = [size.reshape(1) if isinstance(size, Value) else self.const([size], "int") for size in sizes]
        return parts[0] if len(parts) == 1 else self.concat(parts, 0)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        return self.op("Concat", *values, axis=axis)

    def where(self, condition: Value, yes: Value | float, no: Value | float) -> Value:
        kind = yes.kind if isinstance(yes, Value) else no.kind if isinstance(no, Value) else "float"
        yes, no = (part if isinstance(part, Value) else self.const(part, kind) for part in (yes, no))
        return self.op("Where", condition, yes, no)

    def range(self, end: Value | int) -> Value:
        """0, 1, ... up to `end`."""
        if isinstance(end, int):
            return self.const(list(range(end)), "int")
        return self.op("Range", self.const(0, "int"), end, self.const(1, "int"))

    def zeros(self, *sizes: int | Value) -> Value:
        return self.const(0.0, "float").expand(*sizes)

    # functions

    def sigmoid(self, x: Value) -> Value:
        return self.op("Sigmoid", x)

    def silu(self, x: Value) -> Value:
        return x * self.sigmoid(x)

    def gelu(self, x: Value) -> Value:
        return x * 0.5 * (self.op("Erf", x * math.sqrt(0.5)) + 1.0)

    def linear(self, layer: nn.Linear, x: Value, name: str) -> Value:
        """A linear layer on (tokens, inputs)."""
        bias = [] if layer.bias is None else [self.weight(layer.bias, name + ".bias")]
        return self.op("Gemm", x, self.matrix(layer, name), *bias, transB=1)

    # branches and loops

    @contextmanager
    def _inside(self, found: list[onnx.NodeProto]) -> Iterator[None]:
        """Nodes go into `found`, and what is made there is not known outside."""
        nodes, known = self.nodes, self._known
        self.nodes, self._known = found, dict(known)
        try:
            yield
        finally:
            # constants and weights are stored in the whole graph, nodes are not
            stored = {key: value for key, value in self._known.items() if value.name in self.tensors}
            self.nodes, self._known = nodes, {**known, **stored, **self._made}

    def _body(
        self, name: str, make: Callable[[], Sequence[Value]], inputs: Sequence[Value] = ()
    ) -> tuple[onnx.GraphProto, list[Kind]]:
        nodes: list[onnx.NodeProto] = []
        with self._inside(nodes):
            results = list(make())
            ends: list[str] = []
            for result in results:
                # what comes from outside has to pass a node, and a name can be given once
                inside = any(result.name in node.output for node in nodes) and result.name not in ends
                ends.append(result.name if inside else self._name("end"))
                if not inside:
                    self._node("Identity", [result.name], [ends[-1]])
        kinds = [result.kind for result in results]
        described = [
            [helper.make_tensor_value_info(one, KINDS[kind][0], None) for one, kind in pairs]
            for pairs in (
                [(value.name, value.kind) for value in inputs],
                zip(ends, kinds, strict=True),
            )
        ]
        return helper.make_graph(nodes, name, *described), kinds

    def branch(
        self, condition: Value, yes: Callable[[], Sequence[Value]], no: Callable[[], Sequence[Value]]
    ) -> tuple[Value, ...]:
        """What one of two parts of the graph gives; the other one is not computed."""
        one, kinds = self._body("active", yes)
        other, _ = self._body("inactive", no)
        return self.ops("If", [condition], kinds, then_branch=one, else_branch=other)

    def scan(
        self,
        step: Callable[[Value, Value], tuple[Value, Value]],
        start: Value,
        sequence: Value,
        reverse: bool = False,
    ) -> tuple[Value, Value]:
        """Run over the first axis of a sequence.

        Args:
            step: from what was carried so far and one entry, what is carried further and a result.
            start: what is carried at first.
            sequence: (entries, ...).
            reverse: whether to begin with the last entry.

        Returns:
            What was carried in the end, and the results (entries, ...).
        """
        carried = Value(self, self._name("carried"), start.kind)
        entry = Value(self, self._name("entry"), sequence.kind)
        body, kinds = self._body("block", lambda: step(carried, entry), [carried, entry])
        way = [int(reverse)]
        last, results = self.ops(
            "Scan",
            [start, sequence],
            kinds,
            body=body,
            num_scan_inputs=1,
            scan_input_directions=way,
            scan_output_directions=way,
        )
        return last, results

    # the whole

    def check_opset(self) -> None:
        """Reject an opset that lacks one of the operators in the form in which it is used."""
        newest = onnx.defs.onnx_opset_version()
        require(
            self.opset <= newest, f"onnx {onnx.__version__} knows opsets up to {newest}, not {self.opset}"
        )
        for operator in sorted(self.used, key=lambda name: -NEEDS.get(name, OLDEST)):
            needed = NEEDS.get(operator, OLDEST)
            require(
                self.opset >= needed,
                f"opset {self.opset} cannot express {operator}, which this model needs: choose {needed} or later",
            )

    def build(self, name: str, metadata: Mapping[str, str]) -> onnx.ModelProto:
        """The model, checked."""
        self.check_opset()
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, initializer=list(self.tensors.values())
        )
        model = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], producer_name="seqboat"
        )
        model.ir_version = IR_VERSION
        helper.set_model_props(model, dict(metadata))
        onnx.checker.check_model(model)
        return model


def replace_inputs(nodes: Sequence[onnx.NodeProto], old: str, new: str) -> None:
    """Let nodes, and those of their branches, read another value."""
    for node in nodes:
        for place, name in enumerate(node.input):
            if name == old:
                node.input[place] = new
        for attribute in node.attribute:
            if attribute.HasField("g"):
                replace_inputs(attribute.g.node, old, new)
