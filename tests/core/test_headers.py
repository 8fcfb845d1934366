"""The C face: headers that compile as C99 and C++, and structures that lie where DLPack has them."""

import subprocess
from pathlib import Path

import pytest
from helpers.compiler import INCLUDE, compile_c

# DLPack 1.3 under its own names, written from the specification (https://dmlc.github.io/dlpack/latest/c_api.html).
SPECIFICATION = r"""
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
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
CHECK(offsetof(kina_storage, handle) == 0, storage_begins_with_its_handle);
CHECK(offsetof(kina_stream, handle) == 0, stream_begins_with_its_handle);
CHECK(offsetof(kina_resource, handle) == 0, resource_begins_with_its_handle);

static int destroyed = 0;
static void destroy(kina_handle *self) { (void)self; destroyed++; }

int main(void) {
    /* kDLCPU, kDLCUDA, kDLCUDAHost, kDLCUDAManaged; read-only, copied, padded; kDLInt ... kDLFloat4_e2m1fn */
    kina_handle handle;
    kina_tensor tensor;
    char bytes[8];
    int wrong = KINA_DEVICE_CPU != 1 || KINA_DEVICE_CUDA != 2 || KINA_DEVICE_CUDA_HOST != 3
        || KINA_DEVICE_CUDA_MANAGED != 13
        || KINA_DLPACK_FLAG_READ_ONLY != 1u || KINA_DLPACK_FLAG_IS_COPIED != 2u
        || KINA_DLPACK_FLAG_SUBBYTE_TYPE_PADDED != 4u || KINA_DLPACK_MAJOR != 1u || KINA_DLPACK_MINOR != 3u
        || KINA_DTYPE_INT != 0 || KINA_DTYPE_UINT != 1 || KINA_DTYPE_FLOAT != 2 || KINA_DTYPE_OPAQUE != 3
        || KINA_DTYPE_BFLOAT != 4 || KINA_DTYPE_COMPLEX != 5 || KINA_DTYPE_BOOL != 6
        || KINA_DTYPE_FLOAT8_E3M4 != 7 || KINA_DTYPE_FLOAT8_E8M0FNU != 14 || KINA_DTYPE_FLOAT4_E2M1FN != 17
        || KINA_INVALID_SHAPE != 101;
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


def test_two_files_can_include_them(tmp_path: Path):
    """No header defines anything that a second file would define again."""
    everything = "".join(f'#include "{path.name}"\n' for path in sorted(INCLUDE.glob("*.h")))
    (tmp_path / "one.c").write_text(everything + "int main(void) { return 0; }\n")
    (tmp_path / "two.c").write_text(everything)
    first = compile_c(tmp_path / "one.c", tmp_path / "one.o", "-c")
    compile_c(tmp_path / "two.c", tmp_path / "program", str(first))
