"""The GPU in use: its name, its driver and its clock, read through NVML where nvidia-ml-py is."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from fagen import process
from fagen.arch import SM90
from fagen.errors import DeviceError, FagenError


@dataclass(frozen=True)
class Card:
    """What a measurement was made on; no host, no user, no serial number."""

    name: str  # "NVIDIA H200"
    driver: str  # "580.159.03", or "unknown"
    sms: int

    @property
    def slug(self) -> str:
        """The name for a file: 'nvidia-h200'."""
        return "-".join(self.name.lower().split())


def hopper() -> Card:
    """The current CUDA device; DeviceError unless it is a Hopper GPU (compute capability 9.0)."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "no CUDA GPU that torch can see; measuring needs a Hopper GPU (H100, H200) "
            "and a torch built for CUDA"
        )
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    if (properties.major, properties.minor) != SM90.capability:
        raise DeviceError(
            f"{properties.name} has compute capability {properties.major}.{properties.minor}; "
            "these kernels are sm_90a machine code, which only Hopper (9.0) runs"
        )
    return Card(properties.name, _driver(), properties.multi_processor_count)


class Clock:
    """Reads the SM clock of the current device in MHz; every reading is None without NVML."""

    def __init__(self) -> None:
        self._nvml = _nvml()
        self._handle: Any = None
        if self._nvml is None or not torch.cuda.is_available():
            return
        device = torch.cuda.current_device()
        # by UUID, since CUDA_VISIBLE_DEVICES renumbers the devices for CUDA and not for NVML
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        try:
            self._handle = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
        except self._nvml.NVMLError:
            if self._nvml.nvmlDeviceGetCount() == 1:
                self._handle = self._nvml.nvmlDeviceGetHandleByIndex(0)

    def mhz(self) -> int | None:
        """The SM clock now."""
        if self._handle is None:
            return None
        try:
            return int(self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM))
        except self._nvml.NVMLError:
            return None


def _nvml() -> Any:
    """The NVML bindings, initialised; None where the package or the library is missing."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # without the driver the package raises errors of its own: all mean "no"
        return None
    return nvml


def _driver() -> str:
    nvml = _nvml()
    if nvml is not None:
        version = nvml.nvmlSystemGetDriverVersion()
        return version.decode() if isinstance(version, bytes) else str(version)
    try:
        query = process.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    except FagenError:
        return "unknown"
    lines = query.stdout.split()
    return lines[0] if query.returncode == 0 and lines else "unknown"
