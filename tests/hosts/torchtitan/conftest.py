"""A CPU for torchtitan, which knows only accelerators."""

from types import SimpleNamespace

from torchtitan.tools import utils

utils.device_type = "cpu"  # before other modules copy it
utils.device_module = SimpleNamespace(
    current_device=lambda: 0,
    empty_cache=lambda: None,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    set_device=lambda device: None,
)
