int null_library(const char *name, void *stream, int launches);
int cublasLtMatmulDescSetAttribute(void) { return null_library("cublasLtMatmulDescSetAttribute", 0, 0); }
int cublasLtMatmulPreferenceSetAttribute(void) { return null_library("cublasLtMatmulPreferenceSetAttribute", 0, 0); }
int cublasLtMatrixLayoutSetAttribute(void) { return null_library("cublasLtMatrixLayoutSetAttribute", 0, 0); }
