"""fagen: attention kernels for Hopper GPUs, generated from schedules; here are the public names.

Each name is imported when it is first used, so `import fagen` touches nothing.
"""

from importlib import import_module

__version__ = "0.1.0"

# public name → module that defines it; none of these names is also a module's name
_HOMES = {
    "attention": "dispatch",
    "attention_fp8": "dispatch",
    "prepare": "dispatch",
    "quantize": "quantize_op",
    "Schedule": "schedule",
    "read_schedule": "schedule",
    "parse_schedule": "schedule",
    "Plan": "plan",
    "Source": "render",
    "Binary": "build",
    "FagenError": "errors",
    "ScheduleError": "errors",
    "OverBudget": "errors",
    "ToolchainError": "errors",
    "BuildError": "errors",
    "DeviceError": "errors",
    "VerificationError": "errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fagen' has no attribute {name!r}")
    return getattr(import_module(f"fagen.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
