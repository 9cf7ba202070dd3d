"""fagen: attention kernels for Hopper GPUs, generated from schedules; here are the public names.

Each name is imported when it is first used, so `import fagen` touches nothing.
"""

from importlib import import_module

__version__ = "0.1.0"

# public name → module that defines it, with the name there if it is another
_HOMES = {
    "attention": "runtime.attention",
    "attention_fp8": "runtime.attention_fp8",
    "attention_varlen": "runtime.varlen",
    "prepare": "runtime.attention",
    "prepare_varlen": "runtime.varlen",
    "pick": "dispatch.pick",
    "recording": "search.recording",
    "quantize": "runtime.quantize",
    "combine": "runtime.combine",
    "attention_decode": "runtime.decode",
    "prepare_decode": "runtime.decode",
    "reference_for": "runtime.decode",
    "mask": "expr.trace",
    "score": "expr.trace",
    "int32": "expr.trace",
    "float32": "expr.trace",
    "Table": "expr.trace",
    "where": "expr.trace",
    "clamp": "expr.trace",
    "minimum": "expr.trace",
    "maximum": "expr.trace",
    "tanh": "expr.trace",
    "exp": "expr.trace",
    "log": "expr.trace",
    "sqrt": "expr.trace",
    "sigmoid": "expr.trace",
    "Schedule": "kinds.forward.keys",
    "read_schedule": "registry:read",
    "parse_schedule": "registry:parse",
    "Plan": "kinds.forward.plan",
    "Source": "render",
    "Binary": "build",
    "FagenError": "errors",
    "ScheduleError": "errors",
    "ExpressionError": "errors",
    "OverBudget": "errors",
    "ToolchainError": "errors",
    "BuildError": "errors",
    "DeviceError": "errors",
    "VerificationError": "errors",
    "UntunedWarning": "errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fagen' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(f"fagen.{module}"), attribute or name)
    globals()[name] = value  # asked once: a call by this way takes a microsecond more
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
