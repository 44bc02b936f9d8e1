"""Records the torch operations of a call, and the bytes that are alive meanwhile."""

import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

SYNCHRONISING = (
    "_local_scalar_dense",
    "item",
    "nonzero",
    "is_nonzero",
    "equal",
    "masked_select",
    "unique",
)


class _HostTensors(TorchFunctionMode):
    """Notes calls that make a tensor on the host, from where a copy to a GPU waits; the result does
    not show it.
    """

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        index = args[1] if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else None
        parts = index if isinstance(index, tuple) else [index]
        is_list = any(isinstance(part, list | range) for part in parts)
        if is_list or func in (torch.tensor, torch.as_tensor, torch.from_numpy):
            self.calls.append(func.__name__)
        return func(*args, **(kwargs or {}))


def described(value):
    """What a captured graph holds of a value: layout and type of a tensor, anything else
    as it is.
    """
    return (
        (tuple(value.shape), value.stride(), value.dtype)
        if isinstance(value, torch.Tensor)
        else repr(value)
    )


class Recorder(TorchDispatchMode):
    """Notes every operation, what goes in and comes out, and each tensor that it makes (views and
    in-place excepted).

    Attributes:
        operations (list[str]): their names.
        num_kernels (int): those for which a GPU launches kernels: not views, nor memory that is not
            filled.
        calls (list[tuple]): their names, with arguments and results as a captured graph would hold
            them.
        sizes (list[int]): elements of each new tensor.
        devices (set[str]): where new tensors, views and tensors changed in place are.
        host_tensors (list[str]): calls that make a tensor of numbers of the host.
    """

    def __init__(self):
        super().__init__()
        self.operations = []
        self.num_kernels = 0
        self.calls = []
        self.sizes = []
        self.devices = set()
        self._host_tensors = _HostTensors()
        self.host_tensors = self._host_tensors.calls

    def __enter__(self):
        self._host_tensors.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._host_tensors.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations.append(func.overloadpacket.__name__)
        self.num_kernels += not func.is_view and "empty" not in self.operations[-1]
        self.calls.append((str(func), *tree_map(described, (args, kwargs, result))))
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        owned = {tensor.untyped_storage()._cdata for tensor in inputs}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.devices.add(leaf.device.type)
                if leaf.untyped_storage()._cdata not in owned:
                    self.sizes.append(leaf.numel())
        return result


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that are made in the block, now and at most; views and known
    tensors excepted.

    MemTracker of torch.distributed._tools gives the same bytes for full models, but cannot run
    frozen weights.
    """

    def __init__(self, known):
        super().__init__()
        self.now = self.most = 0
        self._storages = weakref.WeakSet(tensor.untyped_storage() for tensor in known)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for storage in (
            leaf.untyped_storage() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)
        ):
            if storage not in self._storages:
                self._storages.add(storage)
                self._add(storage.nbytes())
                weakref.finalize(storage, self._add, -storage.nbytes())
        return result

    def _add(self, num_bytes):
        self.now += num_bytes
        self.most = max(self.most, self.now)


def assert_no_synchronisation(recorder):
    """Of operations recorded on the meta device."""
    assert recorder.devices == {"meta"}, "nothing may be made on the host and copied over"
    assert not recorder.host_tensors
    assert not set(recorder.operations) & set(SYNCHRONISING)
