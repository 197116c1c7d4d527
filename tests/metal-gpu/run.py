#!/usr/bin/env python3
"""Runs recorded Metal launches on an NVIDIA GPU and compares every byte with what the emulator left.

run.py PTX_FOLDER LAUNCHES_FOLDER [--file NAME] [--limit N] [--time ROUNDS]: needs numpy and the CUDA driver. Under compute-sanitizer it also
finds races and stray accesses: compute-sanitizer --tool racecheck python3 run.py ...
"""
import collections, ctypes as C, glob, json, os, sys
import numpy as np

cuda = C.CDLL("libcuda.so.1")


def check(status, what):
    if status:
        text = C.c_char_p()
        cuda.cuGetErrorString(status, C.byref(text))
        raise SystemExit(f"{what}: {text.value.decode() if text.value else status}")


class Gpu(C.Structure):
    """emu_gpu of include/msl.h."""
    _fields_ = [("buffers", C.c_uint64 * 32), ("tgmem", C.c_uint32 * 8), ("grid", C.c_uint32 * 3)]


def module(path):
    m = C.c_void_p()
    log = C.create_string_buffer(8192)
    keys, values = (C.c_int * 2)(5, 6), (C.c_void_p * 2)(C.cast(log, C.c_void_p), C.c_void_p(len(log)))
    status = cuda.cuModuleLoadDataEx(C.byref(m), C.c_char_p(open(path, "rb").read() + b"\0"), 2, keys, values)
    if status:
        print(log.value.decode(errors="replace")[:2000])
    check(status, path)
    return m


def run(modules, ptx, slots, launch, data, repeat=0):
    name = "-".join([launch["file"].removesuffix(".metal"), *launch["defines"]]).replace("=", "")
    if name not in modules:
        modules[name] = module(os.path.join(ptx, name + ".ptx"))
    m = modules[name]
    table, size = C.c_uint64(), C.c_size_t()
    # A file without function constants has no table.
    if cuda.cuModuleGetGlobal_v2(C.byref(table), C.byref(size), m, b"emu_constants") == 0:
        values = (C.c_uint64 * 64)()
        for index, bits in launch["constants"]:
            values[slots[launch["file"]][index]] = bits
        check(cuda.cuMemcpyHtoD_v2(table, values, C.sizeof(values)), "constants")
    function = C.c_void_p()
    check(cuda.cuModuleGetFunction(C.byref(function), m, b"gpu_" + launch["kernel"].encode()), launch["kernel"])
    held, gpu = [], Gpu()

    def upload(at, size):
        p = C.c_uint64()
        check(cuda.cuMemAlloc_v2(C.byref(p), C.c_size_t(max(size, 1))), "memory")
        check(cuda.cuMemcpyHtoD_v2(p, data[at:at + size], C.c_size_t(size)), "upload")
        held.append(p)
        return p.value

    places = [upload(*before) for before, _, _ in launch["places"]]
    for index, kind, what, offset in launch["arguments"]:
        gpu.buffers[index] = places[what] + offset if kind == "place" else upload(*what)
    shared = 0
    for i, size in enumerate(launch["memory"]):
        gpu.tgmem[i] = shared
        shared += (size + 15) // 16 * 16
    kind, grid = launch["grid"]
    group = launch["threadgroup"]
    if kind == "threads":
        gpu.grid[:] = grid
        grid = [-(-g // t) for g, t in zip(grid, group)]
    arguments = (C.c_void_p * 1)(C.cast(C.byref(gpu), C.c_void_p))
    check(cuda.cuLaunchKernel(function, *grid, *group, shared, None, arguments, None), launch["kernel"])
    check(cuda.cuCtxSynchronize(), launch["kernel"])
    if repeat:
        # The inputs in many copies, so that the weights come from memory and not from a cache.
        reads = [(i, what, offset) for i, kind, what, offset in launch["arguments"] if kind == "place" and not launch["places"][what][2]]
        variants, size = [], sum(launch["places"][what][0][1] for _, what, _ in reads)
        for _ in range(max(2, (512 << 20) // max(size, 1))):
            copy = Gpu.from_buffer_copy(gpu)
            for i, what, offset in reads:
                copy.buffers[i] = upload(*launch["places"][what][0]) + offset
            variants.append(copy)
        calls = [(C.c_void_p * 1)(C.cast(C.byref(v), C.c_void_p)) for v in variants]
        begin, end, milliseconds = C.c_void_p(), C.c_void_p(), C.c_float()
        for e in (begin, end):
            check(cuda.cuEventCreate(C.byref(e), 0), "event")
        times = []
        for _ in range(repeat):
            cuda.cuEventRecord(begin, None)
            for call in calls:
                cuda.cuLaunchKernel(function, *grid, *group, shared, None, call, None)
            cuda.cuEventRecord(end, None)
            check(cuda.cuEventSynchronize(end), "event")
            cuda.cuEventElapsedTime(C.byref(milliseconds), begin, end)
            times.append(milliseconds.value / len(calls))
        print(f"  {launch['kernel']:<32} grid {grid} threads {group}: {sorted(times)[len(times) // 2] * 1e3:8.1f} us")
    results = []
    for address, (_, (at, size), written) in zip(places, launch["places"]):
        if written:
            out = C.create_string_buffer(max(size, 1))
            check(cuda.cuMemcpyDtoH_v2(out, C.c_uint64(address), C.c_size_t(size)), "download")
            results.append((np.frombuffer(out.raw[:size], np.uint8), np.frombuffer(data[at:at + size], np.uint8)))
    for p in held:
        cuda.cuMemFree_v2(p)
    return results


def worst(got, want, bf16):
    """The largest difference over the largest value, the bytes read as f32, or as the upper halves of f32."""
    if bf16:
        got, want = [(x.view(np.uint16).astype(np.uint32) << 16).view(np.float32) for x in (got, want)]
    else:
        got, want = got.view(np.float32), want.view(np.float32)
    with np.errstate(all="ignore"):
        difference, size = np.abs(got.astype(np.float64) - want), np.abs(want)
        ok = np.isfinite(difference) & np.isfinite(size)
        return float(difference[ok].max() / max(size[ok].max(), 1e-30)) if ok.any() else 0.0


def main():
    arguments = sys.argv[1:]
    option = lambda name: arguments[arguments.index(name) + 1] if name in arguments else None
    ptx, launches = arguments[:2]
    slots = {f: {int(i): s for i, s in v.items()} for f, v in json.load(open(os.path.join(ptx, "slots.json"))).items()}
    check(cuda.cuInit(0), "CUDA")
    device, context, name = C.c_int(), C.c_void_p(), C.create_string_buffer(100)
    check(cuda.cuDeviceGet(C.byref(device), 0), "device")
    cuda.cuDeviceGetName(name, 100, device)
    check(cuda.cuDevicePrimaryCtxRetain(C.byref(context), device), "context")
    check(cuda.cuCtxSetCurrent(context), "context")
    print(name.value.decode())
    modules, per_kind = {}, collections.Counter()
    ran, equal, off = collections.Counter(), collections.Counter(), collections.defaultdict(list)
    for path in sorted(glob.glob(os.path.join(launches, "*.json"))):
        launch = json.load(open(path))
        if option("--file") not in (None, launch["file"]):
            continue
        per_kind[launch["kernel"], launch["file"]] += 1
        if option("--limit") and per_kind[launch["kernel"], launch["file"]] > int(option("--limit")):
            continue
        data = open(path.removesuffix("json") + "bin", "rb").read()
        results = run(modules, ptx, slots, launch, data, int(option("--time") or 0))
        ran[launch["file"]] += 1
        same = all(np.array_equal(a, b) for a, b in results)
        equal[launch["file"]] += same
        if not same:
            low = min(max(worst(a, b, bf16) for a, b in results) for bf16 in (False, True))
            off[launch["file"]].append((low, launch["kernel"], os.path.basename(path)))
    for file in sorted(ran):
        line = f"{file:<24} {ran[file]:>5} launches, {equal[file]:>5} bit for bit"
        if off[file]:
            low, kernel, path = max(off[file])
            line += f"; worst {low:.1e} ({kernel}, {path})"
        print(line)


main()
