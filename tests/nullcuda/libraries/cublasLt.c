/* cuBLASLt: descriptors that nobody reads, one algorithm for every product, and the product. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

int null_library(const char *name, void *stream, int launches);

int cublasLtMatmulDescCreate(void **out, int compute, int scale) {
  return (*out = calloc(1, 64)) == NULL;
}
int cublasLtMatmulDescDestroy(void *descriptor) { return free(descriptor), 0; }
int cublasLtMatmulPreferenceCreate(void **out) { return (*out = calloc(1, 64)) == NULL; }
int cublasLtMatmulPreferenceDestroy(void *preference) { return free(preference), 0; }
int cublasLtMatrixLayoutCreate(void **out, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  return (*out = calloc(1, 64)) == NULL;
}
int cublasLtMatrixLayoutDestroy(void *layout) { return free(layout), 0; }
size_t cublasLtGetVersion(void) {
  int version;
  return cudaRuntimeGetVersion(&version), 10 * version;
}

/* One result of cublasLtMatmulHeuristicResult_t has 96 bytes; zeros are an algorithm that needs no
 * workspace and has the status "success". */
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c,
                                   void *d, void *preference, int wanted, void *results,
                                   int *found) {
  memset(results, 0, 96);
  *found = 1;
  return 0;
}

int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, void *a_layout,
                   const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                   void *d, void *d_layout, const void *algorithm, void *workspace, size_t bytes,
                   void *stream) {
  return null_library("cublasLtMatmul", stream, 1);
}
