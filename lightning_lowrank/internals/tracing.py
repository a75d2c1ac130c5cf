"""Graphs of the tensor operations that a function makes, traced once for many shapes, and replayed or compiled.

`StepGraphs` traces clients' steps with it. What is private here is the symbolic tracing of
``torch.fx.experimental`` and inductor's compiler for a graph. In a torch without them nothing is traced.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_lowrank.internals.torch import TorchDispatchMode, storage_key, writes

Function = Callable[..., Sequence[Tensor]]

_AS_THEY_ARE = frozenset({"alias", "detach"})
# Called as functions of torch's Python interface, which takes half the time of calling the operator.
_FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        """
        _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data abs add addmm argmax baddbmm bmm cat
        clamp clone cos div embedding eq exp ge gt index_select le log log1p logical_and logical_not lt maximum mean
        minimum mm mul ne neg ones_like pow reciprocal relu rsqrt rsub select sigmoid sin sqrt squeeze stack sub sum
        tanh threshold_backward transpose unsqueeze where zeros_like
        """,
    )
)
_METHODS = frozenset(
    re.findall(
        r"\w+",
        """
        add_ clamp_ copy_ div_ expand fill_ mul_ permute sub_ t view zero_
        """,
    )
)


_OUT_OF_TENSORS = frozenset({"tolist", "numpy", "__array__", "__dlpack__", "data_ptr"})


class Untraceable(BaseException):
    """A function does what its graph would not: the message says what.

    Not an ``Exception``, which the function might catch.
    """


def unsupported_reason() -> str:
    """Say why nothing can be traced with this torch, or return an empty string."""
    try:
        _parts()
    except (ImportError, AttributeError) as error:
        return f"torch {torch.__version__} has no tracing of this kind ({error})"
    return ""


def _parts() -> tuple[Any, ...]:
    """Return what is private to torch here. Importing it takes a good part of a second."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental import proxy_tensor, symbolic_shapes

    names = ("DimDynamic", "ShapeEnv", "StatelessSymbolicContext")
    return FakeTensorMode, proxy_tensor.make_fx, *(getattr(symbolic_shapes, name) for name in names)


def without_values() -> AbstractContextManager[Any]:
    """Return a context in which operations give tensors of the right shape and type, and compute nothing.

    Tensors from outside stand for their shape and type there; those that are written into may have changed afterwards.
    ``from_tensor`` of what is entered returns what stands for a tensor. What reads a number out of the results of
    operations raises an error.

    Raises:
        ImportError: If this torch has no such context; see `unsupported_reason`.
        AttributeError: Likewise.

    Example:
        >>> weight = torch.ones(2, 3)
        >>> with without_values():
        ...     (weight @ torch.ones(3, 4)).shape
        torch.Size([2, 4])
    """
    mode: AbstractContextManager[Any] = _parts()[0](allow_non_fake_inputs=True)
    return mode


class Traced:
    """The operations of a function of tensors, for all shapes that its tracing was not decided by.

    Args:
        function: Takes tensors, and returns a list of tensors. It may write into those it takes.
        tensors: Values of its arguments, of which only shapes, types and devices count.
        sizes: For each argument, the name of the size of each of its dimensions that may vary; ``None`` for fixed ones.
        kept: Places of arguments that the function must not write into.

    Raises:
        Untraceable: If the function reads a number out of a tensor, writes into a tensor that it is not given, or into
            one that is kept.
        Exception: Whatever the function or torch raises where it cannot be traced: it decides by a tensor's value, for
            instance.
    """

    def __init__(
        self,
        function: Function,
        tensors: Sequence[Tensor],
        sizes: Sequence[Sequence[str | None]],
        kept: Sequence[int] = (),
    ) -> None:
        FakeTensorMode, make_fx, DimDynamic, ShapeEnv, StatelessSymbolicContext = _parts()
        self._shapes = ShapeEnv()
        mode = FakeTensorMode(shape_env=self._shapes, allow_non_fake_inputs=True)
        self.symbols: dict[Any, str] = {}
        self._fixed: dict[str, int] = {}
        fakes = []
        for tensor, names in zip(tensors, sizes, strict=True):
            dynamic = [DimDynamic.STATIC if name is None else DimDynamic.DYNAMIC for name in names]
            context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
            fake = mode.from_tensor(tensor.detach(), symbolic_context=context)
            for name, size in zip(names, fake.shape, strict=True):
                if name is None:
                    continue
                if isinstance(size, torch.SymInt):
                    self.symbols[size.node.expr] = name
                else:
                    # Torch takes a size of 1 as fixed.
                    self._fixed[name] = size
            fakes.append(fake)
        self._fakes = fakes

        def guarded(*arguments: Tensor) -> Sequence[Tensor]:
            with _NoNumbers(), _Guard({storage_key(arguments[place]) for place in kept}):
                return function(*arguments)

        with torch.no_grad():
            self.graph = make_fx(guarded, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*fakes)
        self.constants = [getattr(self.graph, node.target) for node in self.graph.graph.nodes if node.op == "get_attr"]

    def holds(self, sizes: Mapping[str, int]) -> bool:
        """Return whether tracing would have gone the same way for these sizes."""
        if any(sizes[name] != size for name, size in self._fixed.items()):
            return False
        if any(sizes[name] < 2 for name in self.symbols.values()):
            # Torch takes a size that varies for two at least, without a guard.
            return False
        values = self._values(sizes)
        try:
            return all(bool(guard.expr.xreplace(values)) for guard in self._shapes.guards)
        except TypeError:
            # A guard of more than these sizes.
            return False

    def _values(self, sizes: Mapping[str, int]) -> dict[Any, int]:
        import sympy

        return {symbol: sympy.Integer(sizes[name]) for symbol, name in self.symbols.items()}

    def replay(self, sizes: Mapping[str, int]) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        """Return a function that makes the operations for these sizes, in the same order.

        Without a graph of autograd's, its results are bit for bit those of the function.
        """
        return _Writer(self, self._values(sizes)).function()

    def varies_to(self, sizes: Mapping[str, int]) -> bool:
        """Return whether compiled code serves these sizes; it takes those that vary to be more than 1."""
        return all(sizes[name] > 1 for name in self.symbols.values())

    def compile(self, products: Sequence[int] = ()) -> Compiled:
        """Return what makes the operations for any of the sizes, compiled by inductor.

        Results are those of the function up to rounding.

        Args:
            products: Places of results that `Compiled.apart` may leave as products, where they are batched products of
                matrices.
        """
        import torch._inductor as inductor

        graph = copy.deepcopy(self.graph)
        apart = _take_apart(graph, products)
        # Random numbers are to be those of the step.
        with torch.no_grad(), inductor.config.patch(fallback_random=True):
            return Compiled(inductor.compile(graph, self._fakes), apart)


class Product(NamedTuple):
    """Two stacks of matrices, ``[clients, rows, inner]`` and ``[clients, inner, columns]``, to be multiplied."""

    left: Tensor
    right: Tensor


class Compiled:
    """The compiled operations of a function of tensors.

    Args:
        function: Takes the tensors. It returns the results, and in place of one that is a product its two factors.
        products: Places of those results.
    """

    def __init__(self, function: Any, products: Sequence[int]) -> None:
        self._function, self._products = function, frozenset(products)

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the results."""
        with torch.no_grad():
            return [torch.bmm(*each) if isinstance(each, Product) else each for each in self.apart(tensors)]

    def apart(self, tensors: Sequence[Tensor]) -> list[Tensor | Product]:
        """Return the results, some of them as products that are still to be made."""
        with torch.no_grad():
            given = iter(self._function(*tensors))
        results: list[Tensor | Product] = []
        for first in given:
            results.append(Product(first, next(given)) if len(results) in self._products else first)
        return results


def _take_apart(graph: Any, places: Sequence[int]) -> list[int]:
    """Have a graph return the factors of results that are products and nothing else; return the results' places."""
    (output,) = (node for node in graph.graph.nodes if node.op == "output")
    found: dict[int, Any] = {}
    results: list[Any] = []
    for place, node in enumerate(output.args[0]):
        if place in places and node.target is torch.ops.aten.bmm.default and list(node.users) == [output]:
            found[place] = node
            results += node.args
        else:
            results.append(node)
    output.args = (results,)
    for node in found.values():
        graph.graph.erase_node(node)
    graph.recompile()
    return list(found)


class _NoNumbers(TorchFunctionMode):
    """Refuses what gives a tensor's values to Python without an operation."""

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if getattr(function, "__name__", "") in _OUT_OF_TENSORS:
            raise Untraceable(f"it takes values out of a tensor ({function.__name__})")
        return function(*arguments, **(keywords or {}))


class _Guard(TorchDispatchMode):
    """Refuses operations of which a graph would keep what they gave, or did, once.

    Args:
        kept: Storages that must not be written into.
    """

    def __init__(self, kept: set[int]) -> None:
        super().__init__()
        self._kept = kept

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if torch.Tag.data_dependent_output in function.tags:
            raise Untraceable(f"it decides or computes by a number that it takes out of a tensor ({function})")
        if writes(function):
            targets = arguments[0] if isinstance(arguments[0], (list, tuple)) else arguments[:1]
            for target in targets:
                if type(target) in (Tensor, torch.nn.Parameter) or storage_key(target) in self._kept:
                    raise Untraceable("it writes into a tensor that is not one of the clients' own")
        return function(*arguments, **(keywords or {}))


def can_compile(device: torch.device) -> str:
    """Say why nothing can be compiled for a device, or return an empty string."""
    try:
        import torch._inductor as inductor
    except ImportError as error:
        return f"torch {torch.__version__} has no inductor ({error})"
    if not hasattr(inductor, "compile"):
        return f"torch {torch.__version__} has no torch._inductor.compile"
    if device.type == "cpu":
        return "" if any(map(shutil.which, ("g++", "clang++", "c++"))) else "there is no C++ compiler (g++ or clang++)"
    if device.type == "cuda":
        try:
            import triton as _  # noqa: F401
        except ImportError:
            return "there is no Triton, which compiles for GPUs (pip install triton)"
        return ""
    return f"inductor does not compile for {device.type}"


class _Writer:
    """Writes a graph as Python whose every line is one operation.

    Sizes stand in it as numbers. What returns its argument as it is, and views of views that turn it back, are left
    out; each value is let go of after its last use.
    """

    def __init__(self, traced: Traced, values: Mapping[Any, int]) -> None:
        self._graph = traced.graph
        self._values = values
        self._bound: dict[str, Any] = {"torch": torch}
        self._same: dict[Any, Any] = {}

    def function(self) -> Callable[[Sequence[Tensor]], list[Tensor]]:
        nodes = list(self._graph.graph.nodes)
        needed = self._needed(nodes)
        inputs: list[str] = []
        lines: list[tuple[str, Any]] = []
        for node in nodes:
            if node.op == "placeholder":
                inputs.append(node.name)
            elif node.op == "get_attr":
                self._bound[node.name] = getattr(self._graph, node.target)
            elif node.op == "output":
                lines.append((f"return [{', '.join(map(self._text, node.args[0]))}]", node))
            elif node in needed and node not in self._same:
                lines.append((f"{node.name} = {self._call(node)}", node))
        last = {used: index for index, (_, node) in enumerate(lines) for used in self._used(node)}
        body = [f"{', '.join(inputs)}, = tensors"]
        for index, (line, node) in enumerate(lines):
            body.append(line)
            over = [each.name for each in self._used(node) if last[each] == index and each.op == "call_function"]
            if over and node.op != "output":
                body.append(f"del {', '.join(over)}")
        source = "\n    ".join(["def replay(tensors):", *body])
        exec(compile(source, "<traced step>", "exec"), self._bound)
        return torch.no_grad()(self._bound["replay"])

    def _used(self, node: Any) -> list[Any]:
        """Return the nodes whose values a node takes."""
        return list(dict.fromkeys(self._original(each) for each in node.all_input_nodes if not self._is_size(each)))

    def _needed(self, nodes: Sequence[Any]) -> set[Any]:
        """Return the nodes that write, or whose values are used. Nodes that give what they take are noted."""
        for node in nodes:
            self._find_same(node)
        needed: set[Any] = set()
        for node in reversed(nodes):
            if node.op == "call_function" and (node in needed or _writes(node)):
                needed.add(node)
                needed.update(self._used(node))
            elif node.op == "output":
                needed.update(self._used(node))
        return needed

    def _find_same(self, node: Any) -> None:
        if node.op != "call_function" or _name(node.target) is None:
            return
        name, arguments = _name(node.target), node.args
        if name in _AS_THEY_ARE:
            self._same[node] = self._original(arguments[0])
        elif name == "transpose" and node.target is torch.ops.aten.transpose.int:
            inner = self._original(arguments[0])
            turned = inner.op == "call_function" and inner.target is node.target
            dimensions = node.meta["val"].ndim
            if turned and {each % dimensions for each in inner.args[1:]} == {
                each % dimensions for each in arguments[1:]
            }:
                self._same[node] = self._original(inner.args[0])

    def _original(self, node: Any) -> Any:
        return self._same.get(node, node)

    def _is_size(self, node: Any) -> bool:
        return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))

    def _call(self, node: Any) -> str:
        arguments = [self._text(value) for value in node.args]
        arguments += [f"{key}={self._text(value)}" for key, value in node.kwargs.items()]
        name = _name(node.target)
        if name is None:
            if getattr(node.target, "__name__", "") == "getitem":
                return f"{arguments[0]}[{arguments[1]}]"
            return f"{self._bind(node.target)}({', '.join(arguments)})"
        if name in _METHODS and not node.kwargs:
            return f"{arguments[0]}.{name}({', '.join(arguments[1:])})"
        if name in _FUNCTIONS:
            self._bound[f"torch_{name}"] = getattr(torch, name, None) or node.target
            return f"torch_{name}({', '.join(arguments)})"
        return f"{self._bind(node.target)}({', '.join(arguments)})"

    def _bind(self, value: Any) -> str:
        name = f"bound_{len(self._bound)}"
        self._bound[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, torch.fx.Node):
            if self._is_size(value):
                return self._number(value.meta["val"])
            return self._original(value).name
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._number(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(self._text, value))}]"
        if value is None or isinstance(value, (bool, int)):
            return repr(value)
        return self._bind(value)

    def _number(self, value: Any) -> str:
        found = value.node.expr.xreplace(self._values)
        if isinstance(value, torch.SymBool):
            return repr(bool(found))
        return repr(float(found) if isinstance(value, torch.SymFloat) else int(found))


def _name(target: Any) -> str | None:
    """Return the name of one of torch's own operators, ``None`` for another function."""
    schema = getattr(target, "_schema", None)
    space, _, name = schema.name.partition("::") if schema is not None else ("", "", "")
    return name if space == "aten" else None


def _writes(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return (schema is None and getattr(node.target, "__name__", "") != "getitem") or bool(schema and schema.is_mutable)
