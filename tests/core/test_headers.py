"""The C face: headers that compile as C99 and C++, and structures that lie where DLPack has them."""

import subprocess
from pathlib import Path

import pytest
from helpers.compiler import INCLUDE, compile_c

import kina

# DLPack 1.3 under its own names, written from the specification (https://dmlc.github.io/dlpack/latest/c_api.html).
SPECIFICATION = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include "kina_tensor.h"
#include "kina_status.h"

typedef struct { uint32_t major; uint32_t minor; } DLPackVersion;
typedef struct { int32_t device_type; int32_t device_id; } DLDevice;
typedef struct { uint8_t code; uint8_t bits; uint16_t lanes; } DLDataType;
typedef struct {
    void *data; DLDevice device; int32_t ndim; DLDataType dtype; int64_t *shape; int64_t *strides;
    uint64_t byte_offset;
} DLTensor;
typedef struct DLManagedTensor {
    DLTensor dl_tensor; void *manager_ctx; void (*deleter)(struct DLManagedTensor *self);
} DLManagedTensor;
typedef struct DLManagedTensorVersioned {
    DLPackVersion version; void *manager_ctx; void (*deleter)(struct DLManagedTensorVersioned *self);
    uint64_t flags; DLTensor dl_tensor;
} DLManagedTensorVersioned;
typedef struct DLPackExchangeAPIHeader {
    DLPackVersion version; struct DLPackExchangeAPIHeader *prev_api;
} DLPackExchangeAPIHeader;
typedef int (*DLPackManagedTensorAllocator)(
    DLTensor *prototype, DLManagedTensorVersioned **out, void *error_ctx,
    void (*SetError)(void *error_ctx, const char *kind, const char *message));
typedef int (*DLPackManagedTensorFromPyObjectNoSync)(void *py_object, DLManagedTensorVersioned **out);
typedef int (*DLPackManagedTensorToPyObjectNoSync)(DLManagedTensorVersioned *tensor, void **out_py_object);
typedef int (*DLPackDLTensorFromPyObjectNoSync)(void *py_object, DLTensor *out);
typedef int (*DLPackCurrentWorkStream)(int32_t device_type, int32_t device_id, void **out_current_stream);
typedef struct DLPackExchangeAPI {
    DLPackExchangeAPIHeader header;
    DLPackManagedTensorAllocator managed_tensor_allocator;
    DLPackManagedTensorFromPyObjectNoSync managed_tensor_from_py_object_no_sync;
    DLPackManagedTensorToPyObjectNoSync managed_tensor_to_py_object_no_sync;
    DLPackDLTensorFromPyObjectNoSync dltensor_from_py_object_no_sync;
    DLPackCurrentWorkStream current_work_stream;
} DLPackExchangeAPI;

#ifdef __cplusplus
#define CHECK(condition, name) static_assert(condition, #name)
#else
#define CHECK(condition, name) typedef char name[(condition) ? 1 : -1]
#endif
#define SAME(theirs, ours, field) \
    CHECK(offsetof(theirs, field) == offsetof(ours, field), same_##ours##_##field)
#define SIZE(theirs, ours) CHECK(sizeof(theirs) == sizeof(ours), size_##ours)

SIZE(DLDevice, kina_dl_device);
SAME(DLDevice, kina_dl_device, device_type);
SAME(DLDevice, kina_dl_device, device_id);
SIZE(DLDataType, kina_dl_dtype);
SAME(DLDataType, kina_dl_dtype, code);
SAME(DLDataType, kina_dl_dtype, bits);
SAME(DLDataType, kina_dl_dtype, lanes);
SIZE(DLPackVersion, kina_dl_version);
SAME(DLPackVersion, kina_dl_version, major);
SAME(DLPackVersion, kina_dl_version, minor);
SIZE(DLTensor, kina_dl_tensor);
SAME(DLTensor, kina_dl_tensor, data);
SAME(DLTensor, kina_dl_tensor, device);
SAME(DLTensor, kina_dl_tensor, ndim);
SAME(DLTensor, kina_dl_tensor, dtype);
SAME(DLTensor, kina_dl_tensor, shape);
SAME(DLTensor, kina_dl_tensor, strides);
SAME(DLTensor, kina_dl_tensor, byte_offset);
SAME(DLTensor, kina_tensor, data);
SAME(DLTensor, kina_tensor, device);
SAME(DLTensor, kina_tensor, ndim);
SAME(DLTensor, kina_tensor, dtype);
SAME(DLTensor, kina_tensor, shape);
SAME(DLTensor, kina_tensor, strides);
SAME(DLTensor, kina_tensor, byte_offset);
CHECK(offsetof(kina_tensor, allocator) == sizeof(DLTensor), kina_follows_the_prefix);
SIZE(DLManagedTensor, kina_dl_managed_tensor);
SAME(DLManagedTensor, kina_dl_managed_tensor, dl_tensor);
SAME(DLManagedTensor, kina_dl_managed_tensor, manager_ctx);
SAME(DLManagedTensor, kina_dl_managed_tensor, deleter);
SIZE(DLManagedTensorVersioned, kina_dl_managed_tensor_versioned);
SAME(DLManagedTensorVersioned, kina_dl_managed_tensor_versioned, version);
SAME(DLManagedTensorVersioned, kina_dl_managed_tensor_versioned, manager_ctx);
SAME(DLManagedTensorVersioned, kina_dl_managed_tensor_versioned, deleter);
SAME(DLManagedTensorVersioned, kina_dl_managed_tensor_versioned, flags);
SAME(DLManagedTensorVersioned, kina_dl_managed_tensor_versioned, dl_tensor);
SIZE(DLPackExchangeAPIHeader, kina_dl_exchange_header);
SAME(DLPackExchangeAPIHeader, kina_dl_exchange_header, version);
SAME(DLPackExchangeAPIHeader, kina_dl_exchange_header, prev_api);
SIZE(DLPackExchangeAPI, kina_dl_exchange_api);
SAME(DLPackExchangeAPI, kina_dl_exchange_api, header);
SAME(DLPackExchangeAPI, kina_dl_exchange_api, managed_tensor_allocator);
SAME(DLPackExchangeAPI, kina_dl_exchange_api, managed_tensor_from_py_object_no_sync);
SAME(DLPackExchangeAPI, kina_dl_exchange_api, managed_tensor_to_py_object_no_sync);
SAME(DLPackExchangeAPI, kina_dl_exchange_api, dltensor_from_py_object_no_sync);
SAME(DLPackExchangeAPI, kina_dl_exchange_api, current_work_stream);

/* What the specification says in numbers, where a pointer has 8 bytes. */
#define AT(structure, field, offset) CHECK(offsetof(structure, field) == (offset), structure##_##field##_at_##offset)
#define BYTES(structure, count) CHECK(sizeof(structure) == (count), structure##_of_##count)
BYTES(kina_dl_device, 8);
BYTES(kina_dl_dtype, 4);
BYTES(kina_dl_version, 8);
BYTES(kina_dl_tensor, 48);
AT(kina_dl_tensor, device, 8);
AT(kina_dl_tensor, ndim, 16);
AT(kina_dl_tensor, dtype, 20);
AT(kina_dl_tensor, shape, 24);
AT(kina_dl_tensor, strides, 32);
AT(kina_dl_tensor, byte_offset, 40);
BYTES(kina_dl_managed_tensor, 64);
AT(kina_dl_managed_tensor, manager_ctx, 48);
AT(kina_dl_managed_tensor, deleter, 56);
BYTES(kina_dl_managed_tensor_versioned, 80);
AT(kina_dl_managed_tensor_versioned, manager_ctx, 8);
AT(kina_dl_managed_tensor_versioned, deleter, 16);
AT(kina_dl_managed_tensor_versioned, flags, 24);
AT(kina_dl_managed_tensor_versioned, dl_tensor, 32);
BYTES(kina_dl_exchange_header, 16);
AT(kina_dl_exchange_header, prev_api, 8);
BYTES(kina_dl_exchange_api, 56);
AT(kina_dl_exchange_api, managed_tensor_allocator, 16);
AT(kina_dl_exchange_api, managed_tensor_from_py_object_no_sync, 24);
AT(kina_dl_exchange_api, managed_tensor_to_py_object_no_sync, 32);
AT(kina_dl_exchange_api, dltensor_from_py_object_no_sync, 40);
AT(kina_dl_exchange_api, current_work_stream, 48);

/* kina's own, on which others compile: a change here needs another version of the ABI. */
BYTES(kina_tensor, 112);
AT(kina_tensor, data, 0);
AT(kina_tensor, allocator, 48);
AT(kina_tensor, stream, 56);
AT(kina_tensor, size_bytes, 64);
AT(kina_tensor, flags, 72);
AT(kina_tensor, storage, 80);
AT(kina_tensor, size, 88);
AT(kina_tensor, span_low, 96);
AT(kina_tensor, span_high, 104);
BYTES(kina_handle, 16);
AT(kina_storage, data, 16);
AT(kina_storage, nbytes, 24);
AT(kina_storage, resource, 32);
AT(kina_storage, stream, 40);
AT(kina_storage, runtime, 48);
AT(kina_storage, domain, 56);
AT(kina_storage, device, 64);
AT(kina_storage, flags, 72);

CHECK(offsetof(kina_storage, handle) == 0, storage_begins_with_its_handle);
CHECK(offsetof(kina_stream, handle) == 0, stream_begins_with_its_handle);
CHECK(offsetof(kina_resource, handle) == 0, resource_begins_with_its_handle);

/* Each function of the table takes and gives what the specification's does. */
static int allocate(kina_dl_tensor *a, kina_dl_managed_tensor_versioned **b, void *c,
                    void (*d)(void *, const char *, const char *)) {
    (void)a; (void)b; (void)c; (void)d;
    return 1;
}
static int from_object(void *a, kina_dl_managed_tensor_versioned **b) { (void)a; (void)b; return 2; }
static int to_object(kina_dl_managed_tensor_versioned *a, void **b) { (void)a; (void)b; return 3; }
static int borrow(void *a, kina_dl_tensor *b) { (void)a; (void)b; return 4; }
static int stream(int32_t a, int32_t b, void **c) { (void)a; (void)b; (void)c; return 5; }
static int call_by_the_specification(const void *table) {
    const DLPackExchangeAPI *theirs = (const DLPackExchangeAPI *)table;
    return theirs->managed_tensor_allocator(NULL, NULL, NULL, NULL) != 1
        || theirs->managed_tensor_from_py_object_no_sync(NULL, NULL) != 2
        || theirs->managed_tensor_to_py_object_no_sync(NULL, NULL) != 3
        || theirs->dltensor_from_py_object_no_sync(NULL, NULL) != 4 || theirs->current_work_stream(2, 0, NULL) != 5
        || theirs->header.version.major != 1 || theirs->header.version.minor != 3 || theirs->header.prev_api != NULL;
}

static int destroyed = 0;
static void destroy(kina_handle *self) { (void)self; destroyed++; }

int main(void) {
    /* kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged; read-only, copied, padded; kDLInt ... kDLFloat4_e2m1fn */
    kina_handle handle;
    kina_tensor tensor;
    kina_dl_exchange_api table = {{{KINA_DLPACK_MAJOR, KINA_DLPACK_MINOR}, NULL},
                                  allocate, from_object, to_object, borrow, stream};
    char bytes[8];
    int wrong = KINA_DEVICE_CPU != 1 || KINA_DEVICE_CUDA != 2 || KINA_DEVICE_CUDA_HOST != 3
        || KINA_DEVICE_CUDA_MANAGED != 13
        || KINA_DLPACK_FLAG_READ_ONLY != 1u || KINA_DLPACK_FLAG_IS_COPIED != 2u
        || KINA_DLPACK_FLAG_SUBBYTE_TYPE_PADDED != 4u || KINA_DLPACK_MAJOR != 1u || KINA_DLPACK_MINOR != 3u
        || KINA_DTYPE_INT != 0 || KINA_DTYPE_UINT != 1 || KINA_DTYPE_FLOAT != 2 || KINA_DTYPE_OPAQUE != 3
        || KINA_DTYPE_BFLOAT != 4 || KINA_DTYPE_COMPLEX != 5 || KINA_DTYPE_BOOL != 6
        || KINA_DTYPE_FLOAT8_E3M4 != 7 || KINA_DTYPE_FLOAT8_E8M0FNU != 14 || KINA_DTYPE_FLOAT4_E2M1FN != 17
        || KINA_TENSOR_READ_ONLY != 1u || KINA_TENSOR_C_CONTIGUOUS != 2u || KINA_TENSOR_F_CONTIGUOUS != 4u
        || KINA_TENSOR_SELF_OVERLAP != 8u || KINA_TENSOR_MISALIGNED != 16u || KINA_STORAGE_READ_ONLY != 1u
        || KINA_STORAGE_ADOPTED != 2u || KINA_INVALID_SHAPE != 101
        || strcmp(KINA_DLPACK_EXCHANGE_CAPSULE, "dlpack_exchange_api") != 0;
    wrong |= call_by_the_specification(&table);
    kina_handle_init(&handle, destroy);
    kina_retain(&handle);
    kina_release(&handle);
    wrong |= destroyed != 0;
    kina_release(&handle);
    wrong |= destroyed != 1;
    kina_retain(NULL);
    kina_release(NULL);
    tensor.data = bytes;
    tensor.byte_offset = 5;
    wrong |= kina_tensor_address(&tensor) != bytes + 5;
    /* what DLPack reads of a kina_tensor is the same thing */
    wrong |= ((DLTensor *)(void *)&tensor)->byte_offset != 5;
    puts(wrong ? "wrong" : "right");
    return wrong;
}
"""


@pytest.mark.parametrize(
    ("suffix", "standard"),
    [("c", "c99"), ("c", "c11"), ("cpp", "c++11"), ("cpp", "c++17")],
    ids=lambda value: value,
)
def test_structures_lie_where_dlpack_has_them(tmp_path: Path, suffix, standard):
    source = tmp_path / f"layout.{suffix}"
    source.write_text(SPECIFICATION)
    program = compile_c(source, tmp_path / "layout", f"-std={standard}")
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "right\n"


@pytest.mark.parametrize("header", sorted(path.name for path in INCLUDE.glob("*.h")))
@pytest.mark.parametrize("suffix", ["c", "cpp"])
def test_each_header_stands_alone_and_twice(tmp_path: Path, header, suffix):
    source = tmp_path / f"alone.{suffix}"
    source.write_text(f'#include "{header}"\n#include "{header}"\n')
    compile_c(source, tmp_path / "alone.o", "-c", "-std=c99" if suffix == "c" else "-std=c++11")


def test_they_are_where_kina_says():
    shipped = Path(kina.get_include())
    assert {path.name for path in shipped.glob("*.h")} == {path.name for path in INCLUDE.glob("*.h")}
    assert shipped.is_absolute()


def test_two_files_can_include_them(tmp_path: Path):
    """No header defines anything that a second file would define again."""
    everything = "".join(f'#include "{path.name}"\n' for path in sorted(INCLUDE.glob("*.h")))
    (tmp_path / "one.c").write_text(everything + "int main(void) { return 0; }\n")
    (tmp_path / "two.c").write_text(everything)
    first = compile_c(tmp_path / "one.c", tmp_path / "one.o", "-c")
    compile_c(tmp_path / "two.c", tmp_path / "program", str(first))
