/* cuBLAS: a handle that knows its stream, and the products that torch asks for. */
#include <stddef.h>
#include <stdlib.h>

int null_library(const char *name, void *stream, int launches);

struct handle {
  void *stream;
  int pointer_mode, math_mode;
};

int cublasCreate_v2(struct handle **out) { return (*out = calloc(1, sizeof **out)) == NULL; }
int cublasDestroy_v2(struct handle *handle) { return free(handle), 0; }
int cublasSetStream_v2(struct handle *handle, void *stream) { return handle->stream = stream, 0; }
int cublasSetWorkspace_v2(struct handle *handle, void *memory, size_t bytes) { return 0; }
int cublasGetPointerMode_v2(struct handle *handle, int *mode) {
  return *mode = handle->pointer_mode, 0;
}
int cublasSetPointerMode_v2(struct handle *handle, int mode) {
  return handle->pointer_mode = mode, 0;
}
int cublasGetMathMode(struct handle *handle, int *mode) { return *mode = handle->math_mode, 0; }
int cublasSetMathMode(struct handle *handle, int mode) { return handle->math_mode = mode, 0; }

#define LAUNCHES(name)                                                                            \
  int name(struct handle *handle) { return null_library(#name, handle->stream, 1); }
LAUNCHES(cublasSgemm_v2)
LAUNCHES(cublasDgemm_v2)
LAUNCHES(cublasCgemm_v2)
LAUNCHES(cublasZgemm_v2)
LAUNCHES(cublasGemmEx)
LAUNCHES(cublasSgemmEx)
LAUNCHES(cublasGemmStridedBatchedEx)
LAUNCHES(cublasSgemmStridedBatched)
LAUNCHES(cublasDgemmStridedBatched)
LAUNCHES(cublasSgemv_v2)
LAUNCHES(cublasDgemv_v2)
LAUNCHES(cublasSdot_v2)
LAUNCHES(cublasDdot_v2)
LAUNCHES(cublasDotEx)
