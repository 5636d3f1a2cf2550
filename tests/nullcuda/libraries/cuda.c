/* The driver: contexts, which torch asks for before it touches a card. */
#include <stdint.h>

int cudaGetDevice(int *device);
int cudaSetDevice(int device);
int cudaGetDeviceCount(int *count);
int cudaRuntimeGetVersion(int *out);
int null_has_context(int device);

enum { CONTEXT = 0x1000 };

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *out) { return cudaRuntimeGetVersion(out); }
int cuDeviceGetCount(int *out) { return cudaGetDeviceCount(out); }
int cuDeviceGet(int *out, int ordinal) { return *out = ordinal, 0; }
int cuDeviceGetAttribute(int *out, int which, int device) { return *out = 0, 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = null_has_context(device);
  return 0;
}
int cuDevicePrimaryCtxRetain(void **out, int device) {
  return *out = (void *)(intptr_t)(CONTEXT + device), 0;
}
int cuCtxGetCurrent(void **out) {
  int device;
  cudaGetDevice(&device);
  return cuDevicePrimaryCtxRetain(out, device);
}
int cuCtxSetCurrent(void *context) { return cudaSetDevice((int)((intptr_t)context - CONTEXT)); }
int cuGetErrorString(int error, const char **out) {
  return *out = error ? "an error of the null driver" : "no error", 0;
}
