"""Call a kernel as a C program would: no torch, one plain allocation per tensor, exactly as large.

    python c_caller.py LIBRARY SLUG DTYPE KEPT HEAD_DIM HEAD_DIM_V B,SQ,SK,H,HK [B,SQ,SK,H,HK ...]

DTYPE is fp16 or bf16, or, as in e4m3-bf16-rows-32, e4m3 with the dtype of the output, how V lies
(rows or columns) and how many rows share a scale (0: all). KEPT is 1 where the workspace holds
zeros, before and after a call, else 0.

It is run under compute-sanitizer, for which torch takes too long to start and allocates too
generously. Speaks to the driver (libcuda) and to the kernel's C interface by ctypes alone, so it
also holds that interface to what its header says. Exits with 1 if an output is wrong.
"""

import ctypes
import math
import random
import struct
import sys

ONE = {"fp16": 0x3C00, "bf16": 0x3F80, "e4m3": 0x38}
EIGHTH = {"fp16": 0x3000, "bf16": 0x3E00, "e4m3": 0x20}  # between them bits grow as numbers do
# e4m3's P is rounded before it weighs V, and not before it is added up: a mean may be 1/16 off
BEYOND = {"fp16": (0x2F80, 0x3C40), "bf16": (0x3DF0, 0x3F88)}
NAN = b"\xff\xff"
KEYS = 16  # that V's columns are filled up to


# of a last group of 16 places, those that hold one of its first n keys, as masks
ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
FIRST_PLACES = [[0xFF * (key < n) for key in ORDER] for n in range(KEYS)]


class Args(ctypes.Structure):
    """struct FagenForwardArgs; strides of each tensor by batch, head, row or column of V."""

    _fields_ = (
        ("struct_bytes", ctypes.c_uint32),
        ("version", ctypes.c_uint32),
        ("workspace", ctypes.c_uint64),
        ("workspace_bytes", ctypes.c_int64),
        ("q", ctypes.c_uint64),
        ("k", ctypes.c_uint64),
        ("v", ctypes.c_uint64),
        ("descales", ctypes.c_uint64 * 3),
        ("means", ctypes.c_uint64 * 2),  # of V and of K
        ("out", ctypes.c_uint64),
        ("lse", ctypes.c_uint64),
        ("qkv_strides", ctypes.c_int64 * 9),
        ("descale_strides", ctypes.c_int64 * 4),  # of Q and K by batch and head
        # of V's descale, V's mean and K's by batch, column and head
        ("column_strides", ctypes.c_int64 * 9),
        ("out_strides", ctypes.c_int64 * 3),
        ("lse_strides", ctypes.c_int64 * 2),
        ("sizes", ctypes.c_int32 * 5),
        ("scale", ctypes.c_float),
    )


class WindowArgs(Args):
    """struct FagenForwardWindowArgs."""

    _fields_ = (("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64))


VERSION = 3  # FAGEN_FORWARD_ARGS


class Driver:
    """The first GPU's primary context, as the CUDA runtime inside the kernel's library uses it."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.do("cuInit", 0)
        self.do("cuDeviceGet", ctypes.byref(device), 0)
        self.do("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.do("cuCtxSetCurrent", context)

    def do(self, name: str, *arguments: object) -> None:
        status = self._cuda[name](*arguments)
        if status:
            sys.exit(f"{name}: CUDA error {status}")

    def allocate(self, content: bytes) -> int:
        """A copy of `content` on the GPU, in an allocation of just that size."""
        pointer = ctypes.c_uint64()
        self.do("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(len(content), 1)))
        if content:
            self.do("cuMemcpyHtoD_v2", pointer, content, ctypes.c_size_t(len(content)))
        return pointer.value

    def take(self, pointer: int, size: int) -> bytes:
        """What lies there; the allocation is freed."""
        content = ctypes.create_string_buffer(size)
        if size:
            self.do("cuMemcpyDtoH_v2", content, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        self.do("cuMemFree_v2", ctypes.c_uint64(pointer))
        return content.raw


def main() -> None:
    """Run every shape; stop at the first that is wrong."""
    library, slug, dtype, kept, head_dim, head_dim_v, *shapes = sys.argv[1:]
    driver, kernel = Driver(), ctypes.CDLL(library)
    kernel[f"fagen_{slug}_message"].restype = ctypes.c_char_p
    for shape in shapes:
        sizes = [int(number) for number in shape.split(",")]
        call(driver, kernel, slug, dtype, kept == "1", int(head_dim), int(head_dim_v), *sizes)
        print(f"{slug} {shape}: as it should be", flush=True)


def call(
    driver: Driver, kernel: ctypes.CDLL, slug: str, dtype: str, kept: bool, d: int, dv: int,
    batch: int, seqlen_q: int, seqlen_k: int, heads: int, kv_heads: int,
) -> None:  # fmt: skip
    """One launch; every output is a mean of values between 1/8 and 1, or 0 where no key is seen."""
    fp8 = dtype.startswith("e4m3")
    dtype, out_dtype, v_layout, scale_rows = dtype.split("-") if fp8 else (dtype, dtype, "rows", 0)
    low, high = EIGHTH[dtype], ONE[dtype]
    dice = random.Random(shape := str((batch, seqlen_q, seqlen_k, heads, kv_heads)))

    def numbers(count: int) -> bytes:
        return struct.pack(
            f"<{count}{'B' if fp8 else 'H'}", *(dice.randrange(low, high) for _ in range(count))
        )

    queries, keys = batch * seqlen_q * heads, batch * seqlen_k * kv_heads
    q, k = (driver.allocate(numbers(n * d)) for n in (queries, keys))
    v_strides = (seqlen_k * kv_heads * dv, dv, kv_heads * dv)
    if v_layout == "columns":
        # a place of the last group holds zero where its key is past the end
        whole = seqlen_k // KEYS * KEYS
        filled = -(-seqlen_k // KEYS) * KEYS
        tail = bytes(FIRST_PLACES[seqlen_k - whole]) if filled > whole else b""
        rows = (
            numbers(whole) + bytes(a & b for a, b in zip(numbers(len(tail)), tail, strict=True))
            for _ in range(batch * kv_heads * dv)
        )
        v = driver.allocate(b"".join(rows))
        v_strides = (kv_heads * dv * filled, dv * filled, filled)
    else:
        v = driver.allocate(numbers(keys * dv))
    out, lse = driver.allocate(NAN * queries * dv), driver.allocate(NAN * 2 * queries)
    windowed = "_window_" in slug
    args = (WindowArgs if windowed else Args)(
        version=VERSION, q=q, k=k, v=v, out=out, lse=lse,
        qkv_strides=(
            *(seqlen_q * heads * d, d, heads * d),
            *(seqlen_k * kv_heads * d, d, kv_heads * d),
            *v_strides,
        ),
        out_strides=(seqlen_q * heads * dv, dv, heads * dv),
        lse_strides=(heads * seqlen_q, seqlen_q),
        sizes=(batch, heads, kv_heads, seqlen_q, seqlen_k),
        scale=1 / math.sqrt(d),
    )  # fmt: skip
    if windowed:
        args.window_left = seqlen_k // 3
    args.struct_bytes = ctypes.sizeof(args)
    descales = []
    if fp8:
        for i, (number, seqlen) in enumerate(((heads, seqlen_q), (kv_heads, seqlen_k))):
            blocks = -(-seqlen // int(scale_rows)) if int(scale_rows) else 1
            ones = struct.pack("<f", 1.0) * (batch * number * blocks)
            descales.append(driver.allocate(ones))
            args.descales[i] = descales[i]
            args.descale_strides[2 * i : 2 * i + 2] = (number * blocks, blocks)
        for i, (columns, number) in enumerate(((dv, 1.0), (dv, 0.0), (d, 0.0))):
            descales.append(
                driver.allocate(struct.pack("<f", number) * (batch * kv_heads * columns))
            )
            args.column_strides[3 * i : 3 * i + 3] = (kv_heads * columns, 1, columns)
        args.descales[2], args.means[0], args.means[1] = descales[2:]
    kernel[f"fagen_{slug}_workspace"].restype = ctypes.c_int64
    needed = kernel[f"fagen_{slug}_workspace"](ctypes.byref(args))
    workspace = driver.allocate(bytes(needed) if kept else needed * b"\xff")
    args.workspace, args.workspace_bytes = workspace if needed else 0, needed
    status = kernel[f"fagen_{slug}"](ctypes.byref(args), None)
    if status:
        sys.exit(f"{slug} {shape}: {kernel[f'fagen_{slug}_message'](status).decode()}")
    driver.do("cuCtxSynchronize")
    values = struct.unpack(f"<{queries * dv}H", driver.take(out, queries * dv * 2))
    sums = struct.unpack(f"<{queries}f", driver.take(lse, queries * 4))
    for pointer in (q, k, v, *descales):
        driver.take(pointer, 0)
    if any(driver.take(workspace, needed if kept else 0)):
        sys.exit(f"{slug} {shape}: the workspace is not left as it was found")
    low, high = BEYOND[out_dtype] if fp8 else (low, high)
    no_key = [row for row in sums if row == -math.inf]
    zeros = sum(value in (0, 0x8000) for value in values)
    beyond = sum(not low <= value <= high and value not in (0, 0x8000) for value in values)
    if beyond or zeros != len(no_key) * dv or not all(row < 100 for row in sums):
        sys.exit(f"{slug} {shape}: {beyond} outputs are no mean of the values, {zeros} are zero")


if __name__ == "__main__":
    main()
