"""A function of tensors as a graph of ATen operations: recorded, made pure, and split.

``make_fx`` runs the function once and records what it does below autograd and ``vmap``.  It refuses a
function that asks for the value of a tensor, since the recording has to hold for other numbers too;
here, one is refused that uses tensors found elsewhere than in its arguments.  Random numbers that
depend on no argument are drawn by a graph of their own, so that they are those of the function.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.graph import CodeGen
from torch.utils._pytree import tree_leaves

from ..linalg.host import nothing_at_hand

#: operations that make an alias or a copy of a number that was written in the program
_LIFTS = (torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default)
_DETACHES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
#: what copies to another device, and what may take indices that are elsewhere than its first argument
_COPY = torch.ops.aten._to_copy.default
_INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default)


#: a tensor that can be replaced: a dict, and the key under which it stands there
Place = tuple[dict[str, Any], str]


class CannotCompile(RuntimeError):
    """Why a step cannot be a graph."""


class Graph:
    """A recorded function of a list of tensors to a list of tensors.

    ``noise`` draws the random numbers; ``pure`` is everything else, from arguments, ``extra`` ones and
    noise.  The extra ones are tensors of modules, or numbers of the program (``constants``).
    """

    def __init__(
        self,
        function: Callable[[], list[Tensor]],
        inputs: Sequence[Tensor],
        kept: int,
        modules: dict[int, Place],
    ) -> None:
        """Record ``function``, which reads ``inputs`` where they are.

        It may write to the first ``kept`` of them, and returns these; the graph leaves them alone.
        ``modules`` says where tensors of modules stand, by their identities.
        """
        graph_module = _record(function, inputs)
        graph_module.graph.set_codegen(CodeGen())  # of flat lists, whatever was traced
        _erase_unused(graph_module)
        self.extra, self.constants = _lift(graph_module, modules)
        _keep_inputs(graph_module, kept)
        _simplify(graph_module)
        moved = _move_constants(graph_module, self.extra, self.constants, inputs[0].device)
        self.extra += moved
        self.constants += [True] * len(moved)
        self.noise, self.pure = _split(graph_module)

    def arguments(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Those of ``pure``; draws the noise."""
        return [*inputs, *(held[name] for held, name in self.extra), *self.noise()]


def differ(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors differ by more than rounding, for the largest entry of each."""
    for x, y in zip(a, b, strict=True):
        if x.is_floating_point() and y.numel():
            size = y.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
            bound = torch.finfo(y.dtype).eps ** 0.5 * max(size, torch.finfo(y.dtype).tiny)
            if not torch.allclose(x, y, rtol=0.0, atol=bound, equal_nan=True):
                return True
    return False


def _record(function: Callable[[], list[Tensor]], inputs: Sequence[Tensor]) -> fx.GraphModule:
    with nothing_at_hand():
        try:
            # the real tensors are recorded by their identity, and no shape is left open; without a mode
            # of fake tensors around it PyTorch makes one, with a stack trace, for each operation
            with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
                return make_fx(lambda *_: function())(*inputs)
        except Exception as error:  # what is wrong without a recording too, the eager step will say
            raise CannotCompile(_reason(error)) from error


def first_line(error: BaseException) -> str:
    """What an error says, in at most 100 characters."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:100]


def _reason(error: BaseException) -> str:
    """Where the program asked for what a recording has not, and what."""
    first = first_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    frame = [f for f in frames if "/lib/python" not in f.filename.replace("\\", "/")][-1]
    name = frame.filename.rpartition("/")[2]
    if "value out of a tracing tensor" in first:
        first = "reads the value of a tensor"
    return f"{name}, line {frame.lineno}, {first}"


def _lift(gm: fx.GraphModule, modules: dict[int, Place]) -> tuple[list[Place], list[bool]]:
    """Make arguments of tensors of modules and numbers of the program; which are the latter."""
    extra: dict[int, tuple[Place, fx.Node]] = {}
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    for node in [n for n in gm.graph.nodes if n.op == "get_attr"]:
        tensor = getattr(gm, node.target)
        if not isinstance(tensor, Tensor):
            raise CannotCompile("it draws from a random generator of its own")
        if tensor._is_zerotensor():  # forward mode makes them where nobody sees it
            with gm.graph.inserting_before(node):
                size, how = list(tensor.shape), {"dtype": tensor.dtype, "device": tensor.device}
                zeros = gm.graph.call_function(torch.ops.aten.zeros.default, (size,), how)
            node.replace_all_uses_with(zeros)
            gm.graph.erase_node(node)
            continue
        if id(tensor) not in modules and not all(user.target in _LIFTS for user in node.users):
            raise CannotCompile(
                f"it uses a tensor of shape {tuple(tensor.shape)} that it finds elsewhere than among "
                f"the arguments of svi.step: pass it as one"
            )
        if id(tensor) not in extra:
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"extra_{len(extra)}")
            place = modules.get(id(tensor), ({node.target: tensor}, node.target))
            extra[id(tensor)] = place, last
        node.replace_all_uses_with(extra[id(tensor)][1])
        gm.graph.erase_node(node)
    return [place for place, _ in extra.values()], [k not in modules for k in extra]


def _keep_inputs(gm: fx.GraphModule, kept: int) -> None:
    """Compute what is written to the first arguments, and leave them as they are."""
    arguments = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for node in arguments[:kept]:
        while writes := [user for user in node.users if _is_mutable(user) and user.args[0] is node]:
            write, overload = writes[0], writes[0].target
            if overload is torch.ops.aten.copy_.default:
                value: Any = write.args[1]
            else:  # p.add_(x) becomes p.add(x)
                packet = getattr(torch.ops.aten, overload._schema.name.split("::")[1].rstrip("_"))
                with gm.graph.inserting_before(write):
                    plain = getattr(packet, overload._overloadname)
                    value = gm.graph.call_function(plain, write.args, write.kwargs)
            write.replace_all_uses_with(value)
            gm.graph.erase_node(write)
            if len(writes) > 1:
                raise CannotCompile("a step writes to a parameter and to what it was before")
            node = value


@torch.no_grad()
def _move_constants(
    gm: fx.GraphModule, extra: list[Place], constants: list[bool], device: torch.device
) -> list[Place]:
    """More arguments, on ``device``, for what the program makes of its numbers elsewhere: copies of
    them, and indices of tensors there.  At each step they would be moved, and the host would wait."""
    if device.type == "cpu":
        return []
    arguments = [node for node in gm.graph.nodes if node.op == "placeholder"]
    own = zip(arguments[len(arguments) - len(extra) :], extra, constants, strict=True)
    values = {node: held[name] for node, (held, name), constant in own if constant}
    written, fixed = _written(gm), set(values)
    for node in gm.graph.nodes:
        pure = isinstance(node.target, torch._ops.OpOverload) and not _is_random(node)
        if pure and node not in written and all(n in fixed for n in node.all_input_nodes):
            fixed.add(node)

    def value(node: fx.Node) -> Any:
        if node not in values:
            args, kwargs = fx.map_arg((node.args, node.kwargs), value)
            target: Any = node.target
            values[node] = target(*args, **kwargs)
        return values[node]

    moved: list[Place] = []
    last = arguments[-1]
    for node in [n for n in gm.graph.nodes if n in fixed and _device(n) is not None]:
        if node.target is _COPY and _device(node) == device != _device(node.all_input_nodes[0]):
            users = [user for user in node.users if not _is_random(user)]
        elif _device(node) != device:
            users = [u for u in node.users if u.target in _INDEXED and u.args[0] is not node]
            users = [user for user in users if _device(user.all_input_nodes[0]) == device]
        else:
            continue
        if users:
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(name := f"moved_{len(moved)}")
            values[last] = value(node).to(device)
            last.meta["val"] = values[last]
            moved.append(({name: values[last]}, name))
        for user in users:
            user.replace_input_with(node, last)
    _erase_unused(gm)
    return moved


def _device(node: fx.Node) -> torch.device | None:
    return getattr(node.meta.get("val"), "device", None)


def _written(gm: fx.GraphModule) -> set[fx.Node]:
    """What an operation writes to, and all that this is a view of."""
    return _with_inputs(
        [node for write in filter(_is_mutable, gm.graph.nodes) for node in _shared(write, True)],
        _shared,
    )


def _shared(node: fx.Node, written: bool = False) -> list[fx.Node]:
    """Of the inputs of an operation those in the memory of its results, or that it writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return node.all_input_nodes
    of = {a.name: a.alias_info for a in node.target._schema.arguments}
    values = dict(zip(of, node.args, strict=False)) | node.kwargs
    shared = [values[k] for k, a in of.items() if k in values and a and (a.is_write or not written)]
    return [n for n in tree_leaves(shared) if isinstance(n, fx.Node)]


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _simplify(gm: fx.GraphModule) -> None:
    """Without detached aliases (the graph runs without gradients), fresh copies, unused results."""
    written = _written(gm)
    for node in list(gm.graph.nodes):
        alias = node.target in _DETACHES or (node.target in _LIFTS and node not in written)
        if alias and isinstance(node.args[0], fx.Node):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
    _erase_unused(gm)


def _erase_unused(gm: fx.GraphModule) -> None:
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and not _is_random(node) and not node.is_impure():
            gm.graph.erase_node(node)


def _is_random(node: fx.Node) -> bool:
    overload = node.target
    return isinstance(overload, torch._ops.OpOverload) and (
        torch.Tag.nondeterministic_seeded in overload.tags
    )


def _with_inputs(
    nodes: Iterable[Any], inputs: Callable[[fx.Node], list[fx.Node]] = lambda n: n.all_input_nodes
) -> set[fx.Node]:
    """Nodes and all that they are made of, by ``inputs`` of each."""
    found = set(nodes)
    stack = list(found)
    while stack:
        for node in inputs(stack.pop()):
            if node not in found:
                found.add(node)
                stack.append(node)
    return found


def _split(gm: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The part that draws random numbers without any argument, and the rest."""
    free: set[fx.Node] = set()  # of arguments and of random numbers that depend on them
    drawn: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op in ("call_function", "get_attr") and all(
            n in free for n in node.all_input_nodes
        ):
            mutates = node.op == "call_function" and node.is_impure() and not _is_random(node)
            if not mutates:
                free.add(node)
                drawn += [node] if _is_random(node) else []
    needed = _with_inputs(drawn)
    noise, copies = fx.Graph(), {}
    for node in gm.graph.nodes:
        if node in needed:
            copies[node] = noise.node_copy(node, lambda n: copies[n])
    noise.output(tuple(copies[node] for node in drawn))
    noise_module = fx.GraphModule(gm, noise)
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    for number, node in enumerate(drawn):
        with gm.graph.inserting_after(last):
            last = gm.graph.placeholder(f"noise_{number}")
        node.replace_all_uses_with(last)
        filled = node.args[0] if _is_mutable(node) else None
        gm.graph.erase_node(node)
        if isinstance(filled, fx.Node):  # x.normal_(), where x is read afterwards
            filled.replace_all_uses_with(last)
    _erase_unused(gm)
    gm.graph.lint()
    return noise_module, fx.GraphModule(gm, gm.graph)
