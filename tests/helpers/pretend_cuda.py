"""A pretend GPU for CPU builds of PyTorch: tensors of device cuda whose memory and arithmetic are the CPU's.

    with pretend_cuda.installed(num_devices=2) as gpu:
        script.train(script.Args(device="cuda"))
    print(gpu.launches, gpu.waits, gpu.races)

It must be imported before torch, as  python -m pytest -p pretend_cuda  does: a process of its own is best.

As on a GPU: PyTorch itself refuses operations on tensors of two devices, and NumPy sees none of them. A
thread begins with device 0. Streams run beside one another, and it is a race if one reads what another has
not yet written. The host waits only where PyTorch makes it wait; a copy to the host that does not wait is
garbage until then. A CUDA graph repeats what it captured on the same memory, and keeps numbers and CPU
tensors as they were. cuDNN wants contiguous states, and the weights of an LSTM in one piece.
init_process_group() and torch.compile see a GPU.

Not as on a GPU: kernels, their rounding (TF32, bfloat16), speed, memory, Triton, NCCL.
"""

import contextlib
import ctypes
import hashlib
import importlib.util
import math
import subprocess
import sys
import threading
import traceback
from collections import Counter, defaultdict
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_suffix(".cpp")


def compiled() -> Path:
    """The library of SOURCE for this PyTorch. The first call takes half a minute."""
    torch_dir = Path(importlib.util.find_spec("torch").submodule_search_locations[0])
    made_of = (
        SOURCE.read_text(encoding="utf-8")
        + (torch_dir / "version.py").read_text(encoding="utf-8")
        + str(torch_dir)
    )
    folder = SOURCE.parent.parent.parent / ".pytest_cache"
    path = folder / f"pretend_cuda-{hashlib.sha1(made_of.encode()).hexdigest()[:12]}.so"
    folder.mkdir(exist_ok=True)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            command = ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", SOURCE, "-o", path.with_suffix(".tmp")]
            command += [f"-I{torch_dir}/include", f"-L{torch_dir}/lib", "-lc10", "-ltorch_cpu"]
            subprocess.run(command, check=True)
            path.with_suffix(".tmp").replace(path)
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_dir / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    return path


if "torch" in sys.modules:
    raise ImportError("import pretend_cuda before torch")
LIBRARY = ctypes.CDLL(str(compiled()))
LIBRARY.install()

import torch  # noqa: E402
import torch.backends.cudnn.rnn  # noqa: E402

aten, pretend = torch.ops.aten, torch.ops.pretend

# The host waits for these, as a number or the shape of a result depends on the data.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive"}
WAITING |= {"equal"}
INDEXING = {"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# These launch no kernel.
VIEWS = {"view", "_unsafe_view", "as_strided", "_reshape_alias", "unfold", "view_as_real", "detach", "alias"}
VIEWS |= {"transpose", "permute", "expand", "slice", "select", "unsqueeze", "squeeze", "unbind", "split"}
VIEWS |= {"diagonal", "split_with_sizes", "t"}
FREE = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "set_"} | VIEWS
FREE |= {"record_stream", "_local_scalar_dense", "_has_compatible_shallow_copy_type", "lift_fresh"}
FREE |= {"is_pinned"}
# These take numbers of the CPU beside tensors of a GPU; pointwise operations do, too.
WITH_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "where", "_fused_adam_", "_fused_adamw_"}

Stream = tuple[int, int]  # device, and number on it; 0 is the default stream


# === What happened ===========================================================================


class Gpu:
    """What happened since installed(), and what each stream has done and knows."""

    def __init__(self, num_devices: int):
        self.num_devices, self.num_streams = num_devices, 0
        self.launches, self.waits = Counter(), Counter()  # by operation
        self.copied = Counter()  # bytes, by direction
        self.races, self.loose_weights = [], []
        self.launched, self.done = Counter(), Counter()  # operations by stream; those the host waited for
        self.seen = defaultdict(Counter)  # operations of other streams that a stream has waited for
        self.written, self.read = {}, defaultdict(dict)  # by memory: (stream, operation); operation by stream
        self.on_the_way = []  # copies to the host that nobody has waited for: stream, target, value
        self.lock, self.thread = threading.RLock(), threading.local()

    @property
    def device(self) -> int:
        return LIBRARY.get_device()

    @property
    def stream(self) -> Stream:
        return getattr(self.thread, "stream", (self.device, 0))

    @property
    def graph(self) -> "CUDAGraph | None":
        """The one that this thread captures."""
        return getattr(self.thread, "graph", None)

    def wait(self, what: str, stream: Stream | None = None):
        """The host waits until a stream, by default the current one, is empty."""
        if self.graph:
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what}")
        stream = stream or self.stream
        self.waits[what] += 1
        self.done[stream] = self.launched[stream]
        for arrived in [copy for copy in self.on_the_way if copy[0] == stream]:
            self.on_the_way.remove(arrived)
            arrived[1].copy_(arrived[2])

    def is_ready(self, x: torch.Tensor) -> bool:
        """Whether every stream may read x, as the host has waited for what wrote it."""
        stream, number = self.written.get(memory_of(x), (None, 0))
        return number <= self.done[stream]

    def look_for_race(self, name: str, x: torch.Tensor, is_written: bool):
        """Whether the current stream may use x before another one has written it, or write it too early."""
        memory, now = memory_of(x), self.stream
        writer, number = self.written.get(memory, (now, 0))
        before = {writer: number} | (self.read[memory] if is_written else {})
        for other, number in before.items():
            if other != now and number > max(self.done[other], self.seen[now][other]):
                stack = [f for f in traceback.extract_stack() if "/torch/" not in f.filename]
                place = next((f for f in reversed(stack) if f.filename != __file__), stack[0])
                self.races.append((name, f"{Path(place.filename).name}:{place.lineno}", other, now))
        if is_written:
            self.written[memory] = now, self.launched[now]
            self.read.pop(memory, None)
        else:
            self.read[memory][now] = self.launched[now]

    def forget(self, x: torch.Tensor):
        """x lies in memory that was free."""
        self.written.pop(memory_of(x), None)
        self.read.pop(memory_of(x), None)


GPU = Gpu(1)


def memory_of(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def is_ours(x) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cuda"


def tensors_in(*args) -> list[torch.Tensor]:
    found = []
    for x in args:
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif isinstance(x, (list, tuple, dict)):
            found += tensors_in(*(x.values() if isinstance(x, dict) else x))
    return found


def tree_map(function, x):
    """torch.utils._pytree's, for what operations take and return: it is called often, and faster."""
    if type(x) in (list, tuple):
        return type(x)([tree_map(function, y) for y in x])
    return {name: tree_map(function, y) for name, y in x.items()} if type(x) is dict else function(x)


def is_blocking(args, kwargs) -> bool:
    """Whether copy_() waits."""
    return not (kwargs.get("non_blocking") or len(args) > 2 and args[2])


def garbage(x: torch.Tensor):
    """What is in memory before a kernel or a copy has written it."""
    if x.dtype == torch.bool:
        x.fill_(True)
    else:
        x.fill_(math.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


# === Operations ==============================================================================


def run(func, *args, **kwargs):
    """Any operation that PyTorch dispatches to CUDA."""
    name = func._schema.name.split("::")[1]
    if name == "set_":
        return set_(*args)
    device = kwargs.get("device")
    ours = [x for x in tensors_in(args, kwargs) if is_ours(x)]
    written = {id(x) for x in written_by(func, args, kwargs)}
    index = ours[0].device.index if ours and device is None else None  # of new tensors
    if device is not None and device.type == "cuda":
        index = GPU.device if device.index is None else device.index
    with GPU.lock:
        check_devices(func, name, args, kwargs)
        account(name, args, kwargs)
        if name == "copy_" and not is_ours(args[0]) and not is_blocking(args, kwargs):
            GPU.on_the_way.append((GPU.stream, args[0], pretend.to_cpu(args[1]).clone()))
            garbage(args[0])
            return args[0]
        borrowed = Borrowed()
        args, kwargs = tree_map(borrowed.lend, args), tree_map(borrowed.lend, kwargs)
        kernel = KERNELS.get(func, func)
        if GPU.graph:
            args, kwargs = GPU.graph.freeze(func, args, kwargs, borrowed)
        result = kernel(*args, **kwargs)
        if GPU.graph:
            GPU.graph.record(kernel, args, kwargs, result)
        if written:
            borrowed.adopt_changes()
        result = tree_map(lambda x: borrowed.give_back(x, index), result)
        for x in borrowed.new:
            GPU.forget(x)
        if name not in FREE:
            for x in ours:
                GPU.look_for_race(name, x, is_written=id(x) in written)
            for x in borrowed.new:
                GPU.look_for_race(name, x, is_written=True)
        return result


class Borrowed:
    """CPU tensors in the memory of the GPU's, for the time of one operation."""

    def __init__(self):
        self.lent = {}  # the CPU's tensor and ours, by the id of the CPU's
        self.base = {}  # one of ours, by memory
        self.new = []

    def lend(self, x):
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not is_ours(x):
            return x
        has_memory = x.untyped_storage().nbytes() > 0
        y = pretend.to_cpu(x) if has_memory else torch.empty(x.shape, dtype=x.dtype)
        self.lent[id(y)] = y, x
        self.base.setdefault(memory_of(y), x)
        return y

    def adopt_changes(self):
        """Gives ours the shapes and memory that an operation in place has changed."""
        for y, x in self.lent.values():
            has_moved = memory_of(y) != memory_of(x)
            ours, theirs = ((z.shape, z.stride(), z.storage_offset()) for z in (x, y))
            if has_moved or ours != theirs:
                pretend.adopt(x, y, has_moved)
            if has_moved:
                GPU.forget(x)

    def give_back(self, y, index: int | None):
        """A result: what was lent, a view of it, or a new tensor of the GPU of this index."""
        if not isinstance(y, torch.Tensor) or is_ours(y):
            return y
        if id(y) in self.lent:
            return self.lent[id(y)][1]
        if y.untyped_storage().nbytes() and memory_of(y) in self.base:
            return pretend.view_like(self.base[memory_of(y)], y)
        if index is None:
            return y
        self.new.append(pretend.to_gpu(y, index))
        return self.new[-1]


def written_by(func, args, kwargs) -> list[torch.Tensor]:
    """The arguments that an operation changes."""
    values = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
    changed = [x for x in func._schema.arguments if x.alias_info and x.alias_info.is_write]
    return tensors_in([values.get(x.name) for x in changed])


def set_(x, source, *place):
    if isinstance(source, torch.Tensor):
        place, source = (source.storage_offset(), source.shape, source.stride()), source.untyped_storage()
    pretend.set_storage(x, source, *(place or (0, [source.nbytes() // x.element_size()], [1])))
    return x


def check_devices(func, name: str, args, kwargs):
    """What PyTorch's code for CUDA checks. Its code for all devices has checked most before."""
    tensors = tensors_in(args, kwargs)
    if name in ("copy_", "_foreach_copy_") or len({x.device for x in tensors}) < 2:
        return
    if name in INDEXING:  # indices may be on the CPU, and so may a number that is put there
        device = args[0].device
        wrong = [x for x in args[1] if x is not None and x.device.type != "cpu" and x.device != device]
        values = args[2] if len(args) > 2 and isinstance(args[2], torch.Tensor) else args[0]
        if not wrong and (values.device == device or values.dim() == 0):
            return
    else:
        devices = {x.device for x in tensors if x.device.type != "cpu" or x.dim()}
        if len(devices) == 1 and (torch.Tag.pointwise in func.tags or name in WITH_NUMBERS):
            return
    found = ", ".join(f"{x.device} {tuple(x.shape)}" for x in tensors)
    raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {found}")


def account(name: str, args, kwargs):
    """Counts what is launched, and what the host waits for."""
    if name not in FREE:
        GPU.launched[GPU.stream] += 1
        GPU.launches[name] += 1
    if name == "copy_" and args[0].device.type != args[1].device.type:
        direction = "to GPU" if is_ours(args[0]) else "to CPU"
        GPU.copied[direction] += args[1].numel() * args[1].element_size()
        if is_blocking(args, kwargs):
            GPU.wait(f"copy {direction}")
    elif name in WAITING:
        GPU.wait(name)
    elif name in INDEXING:
        indices = [x for x in args[1] if x is not None]
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            GPU.wait(f"{name} by booleans")
        elif any(x.device.type == "cpu" for x in indices):
            GPU.wait(f"{name} by indices of the CPU")


def lstm_cell(input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = input_gates + hidden_gates
    gates = gates if input_bias is None else gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat((i, f, g, o), 1)


def lstm_cell_backward(grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = workspace.chunk(4, 1)
    tanh = cy.tanh()
    grad_hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    grad_c = grad_hy * o * (1 - tanh * tanh)
    grad_c = grad_c if grad_cy is None else grad_c + grad_cy
    grad_i, grad_f = grad_c * g * i * (1 - i), grad_c * cx * f * (1 - f)
    grad_g, grad_o = grad_c * i * (1 - g * g), grad_hy * tanh * o * (1 - o)
    gates = torch.cat((grad_i, grad_f, grad_g, grad_o), 1)
    return gates, grad_c * f, gates.sum(0) if has_bias else torch.empty(0)


# what PyTorch has for CUDA alone
KERNELS = {
    aten._thnn_fused_lstm_cell.default: lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: lstm_cell_backward,
    aten._pin_memory.default: lambda x, device=None: x.clone(),
    aten.record_stream.default: lambda x, stream: None,
    aten.empty.memory_format: lambda *a, pin_memory=None, **k: aten.empty.memory_format(*a, **k),
    aten.empty_strided.default: lambda *a, pin_memory=None, **k: aten.empty_strided.default(*a, **k),
}
run = torch._disable_dynamo(run)  # it would be compiled like all Python that a compiled function calls
FALLBACK = torch.library.Library("_", "IMPL")
FALLBACK.fallback(run, "CUDA")
# PyTorch has code for all devices for these, which does not work here or counts as many kernels.
EXPLICIT = """
copy_ convolution convolution_backward clone repeat is_pinned _pin_memory _foreach_copy_ _foreach_norm.Scalar
_foreach_mul_.Tensor _foreach_mul_.Scalar _foreach_add_.Scalar _foreach_zero_ remainder.Scalar
"""
OVERRIDES = torch.library.Library("aten", "IMPL")
for op in EXPLICIT.split():
    overload = getattr(getattr(aten, op.partition(".")[0]), op.partition(".")[2] or "default")
    OVERRIDES.impl(op, lambda *args, _op=overload, **kwargs: run(_op, *args, **kwargs), "CUDA")


# === CUDA graphs =============================================================================


class CUDAGraph:
    """Operations that are repeated on the memory with which they were captured.

    They run when they are captured, as their results have shapes, and then what they changed is taken back.
    """

    def capture_begin(self, **_):
        self.steps, self.changed, self.made, self.random = [], {}, {}, torch.get_rng_state()
        GPU.thread.graph = self

    def freeze(self, func, args, kwargs, borrowed: Borrowed):
        """Arguments to repeat an operation with: tensors of the CPU stay as they are now."""
        for x, _ in borrowed.lent.values() if func._schema.is_mutable else ():
            storage = x.untyped_storage()
            if storage.nbytes() and storage.data_ptr() not in self.made.keys() | self.changed.keys():
                self.changed[storage.data_ptr()] = storage, storage.clone()

        def freeze(x):
            return x.clone() if isinstance(x, torch.Tensor) and id(x) not in borrowed.lent else x

        return tree_map(freeze, args), tree_map(freeze, kwargs)

    def record(self, kernel, args, kwargs, result):
        known = {memory_of(x) for x in tensors_in(args, kwargs)}
        self.made |= {memory_of(x): x for x in tensors_in(result) if memory_of(x) not in known}
        self.steps.append((kernel, args, kwargs, result))

    def capture_end(self):
        GPU.thread.graph = None
        torch.set_rng_state(self.random)
        for storage, before in self.changed.values():
            storage.copy_(before)
        with torch.inference_mode():  # or what was made in it could not be changed
            for x in self.made.values():
                garbage(x)

    @torch.inference_mode()
    def replay(self):
        GPU.launches["CUDA graph"] += 1
        GPU.launched[GPU.stream] += 1
        for kernel, args, kwargs, result in self.steps:
            again = kernel(*args, **kwargs)
            for x, y in zip(tensors_in(result), tensors_in(again), strict=True):
                if memory_of(x) != memory_of(y):
                    x.copy_(y)
                GPU.written[memory_of(x)] = GPU.stream, GPU.launched[GPU.stream]


@contextlib.contextmanager
def capture(graph: CUDAGraph, **_):
    """torch.cuda.graph()"""
    synchronize()  # as PyTorch does before it captures
    graph.capture_begin()
    try:
        yield
    finally:
        graph.capture_end()


# === Streams and devices =====================================================================


class CUDAStream:
    """torch.cuda.Stream: on the current device of the thread that makes it."""

    def __init__(self, device=None, priority=0, key: Stream | None = None):
        GPU.num_streams += key is None
        self.key = key or (GPU.device if device is None else torch.device(device).index, GPU.num_streams)

    def synchronize(self):
        GPU.wait("Stream.synchronize", self.key)

    def wait_stream(self, other: "CUDAStream"):
        known = GPU.seen[self.key]
        known |= GPU.seen[other.key] | Counter({other.key: GPU.launched[other.key]})


@contextlib.contextmanager
def on_stream(stream: CUDAStream):
    """torch.cuda.stream()"""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def current_stream(device=None) -> CUDAStream:
    return CUDAStream(key=GPU.stream)


def set_stream(stream: CUDAStream):
    GPU.thread.stream = stream.key
    LIBRARY.set_device(stream.key[0])


def set_device(device):
    index = device if isinstance(device, int) else torch.device(device).index
    if index >= GPU.num_devices:
        raise RuntimeError("CUDA error: invalid device ordinal")
    set_stream(CUDAStream(key=(index, 0)))


def synchronize(device=None):
    for stream in list(GPU.launched):
        if stream[0] == GPU.device:
            GPU.wait("synchronize", stream)


# === Installation ============================================================================


def flatten_weight(weights, *_):
    """Puts the weights of an LSTM one after the other in one piece of memory, as cuDNN wants them."""
    chunk, begin = torch.cat([w.detach().flatten() for w in weights]), 0
    for w in weights:
        w.data = chunk[begin : begin + w.numel()].view_as(w)
        begin += w.numel()


def memory_format(x, weight, backend):
    """Of a convolution's output, for the fake tensors of torch.compile."""
    last = torch.channels_last
    x_is_last = not x.is_contiguous() and x.is_contiguous(memory_format=last)
    weight_is_last = not weight.is_contiguous() and weight.is_contiguous(memory_format=last)
    return last if x.dim() == 4 and (x_is_last or weight_is_last) else torch.contiguous_format


def checked(lstm):
    """torch._VF.lstm, with what cuDNN refuses or warns of."""

    def checked_lstm(x, hx, weights, *rest):
        if is_ours(x) and isinstance(hx, (list, tuple)):
            for name, h in zip(("hx", "cx"), hx, strict=True):
                if not h.is_contiguous():
                    raise RuntimeError(f"rnn: {name} is not contiguous")
            ends = [w.data_ptr() + w.element_size() * w.numel() for w in weights]
            if weights[0].storage_offset() or [w.data_ptr() for w in weights[1:]] != ends[:-1]:
                GPU.loose_weights.append(tuple(x.shape))  # cuDNN gets a copy for this call
        return lstm(x, hx, weights, *rest)

    return checked_lstm


def get_rng_state(*_) -> torch.Tensor:
    """PyTorch's compiler asks for it whenever it compiles, and so must not compile within a capture."""
    if GPU.graph:
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")
    return torch.zeros(16, dtype=torch.uint8)


def check_capturable(optimizer: torch.optim.Optimizer):
    """What step() checks in builds with CUDA."""
    if torch.compiler.is_compiling():
        return
    if GPU.graph and not all(group["capturable"] for group in optimizer.param_groups):
        raise RuntimeError(f"Attempting CUDA graph capture of step() for {optimizer} without capturable=True")


def fakes() -> list[tuple[object, dict]]:
    """What takes the place of PyTorch's functions that need a build with CUDA."""
    cuda = dict(is_available=lambda: True, device_count=lambda: GPU.num_devices, _lazy_init=lambda: None)
    cuda |= dict(current_device=lambda: GPU.device, set_device=set_device, synchronize=synchronize)
    cuda |= dict(_exchange_device=lambda index: 0, _maybe_exchange_device=lambda index: 0)
    cuda |= dict(device_of=lambda x: contextlib.nullcontext())
    cuda |= dict(Stream=CUDAStream, stream=on_stream, set_stream=set_stream, current_stream=current_stream)
    cuda |= dict(CUDAGraph=CUDAGraph, graph=capture)
    cuda |= dict(is_current_stream_capturing=lambda: GPU.graph is not None)
    cuda |= dict(manual_seed=lambda seed: None, manual_seed_all=lambda seed: None)  # numbers are the CPU's
    cuda |= dict(get_rng_state=get_rng_state, set_rng_state=lambda *_: None)
    cuda |= dict(get_device_name=lambda *_: "pretend GPU", get_device_capability=lambda *_: (9, 0))
    cuda |= dict(is_bf16_supported=lambda *_: True)
    checks = [name for name in vars(torch.optim.Optimizer) if name.endswith("_graph_capture_health_check")]
    flatten = dict(_use_cudnn_rnn_flatten_weight=lambda: True, _cudnn_rnn_flatten_weight=flatten_weight)
    return [
        (torch.cuda, cuda),
        (torch, flatten),
        (torch.optim.Optimizer, dict.fromkeys(checks, check_capturable)),
        (torch.backends.cudnn, dict(is_acceptable=lambda x: True)),
        (torch.backends.cudnn.rnn, dict(get_cudnn_mode=lambda mode: 2)),
        (torch._VF, dict(lstm=checked(torch._VF.lstm))),
        (torch._C, dict(_conv_determine_backend_memory_format=memory_format)),
    ]


@contextlib.contextmanager
def installed(num_devices: int = 1):
    """PyTorch finds so many GPUs in this block."""
    global GPU
    GPU = Gpu(num_devices)
    with contextlib.ExitStack() as stack:
        for holder, names in fakes():
            for name, fake in names.items():
                stack.callback(setattr, holder, name, getattr(holder, name))
                setattr(holder, name, fake)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.callback(LIBRARY.set_device, 0)
        yield GPU
