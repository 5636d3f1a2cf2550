/* Kernels: they are noted by name, and compute nothing (values.py fills in what they would). */
#include "null.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* What torch's libraries register when they are loaded, before any thread can launch. */
static struct kernel {
  const void *address;
  const char *name;
} *kernels;
static size_t room, used;

static struct kernel *find(const void *address) {
  size_t place = ((uint64_t)address >> 2) * 0x9E3779B97F4A7C15ULL >> 20;
  while (kernels[place & (room - 1)].address && kernels[place & (room - 1)].address != address)
    place++;
  return &kernels[place & (room - 1)];
}

void __cudaRegisterFunction(void **binary, const char *address, char *device_name,
                            const char *name, int limit, void *a, void *b, void *c, void *d,
                            int *e) {
  if (2 * (used + 1) > room) {
    struct kernel *old = kernels;
    size_t count = room;
    room = room ? 2 * room : 1 << 16;
    kernels = calloc(room, sizeof *kernels);
    for (size_t i = 0; i < count; i++)
      if (old[i].address) *find(old[i].address) = old[i];
    free(old);
  }
  struct kernel *kernel = find(address);
  used += !kernel->address;
  *kernel = (struct kernel){address, name};
}

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
void __cudaRegisterVar(void **binary, char *variable, char *address, const char *name,
                       int is_external, size_t bytes, int is_constant, int is_global) {}
char __cudaInitModule(void **binary) { return 0; }

/* `kernel<<<grid, block, bytes, stream>>>` pushes these, and the stub behind it pops them. */
static _Thread_local struct {
  dim3 grid, block;
  size_t bytes;
  cudaStream_t stream;
} calls[8];
static _Thread_local int depth;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t bytes, cudaStream_t stream) {
  calls[depth].grid = grid;
  calls[depth].block = block;
  calls[depth].bytes = bytes;
  calls[depth++].stream = stream;
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *bytes, void *stream) {
  depth--;
  *grid = calls[depth].grid;
  *block = calls[depth].block;
  *bytes = calls[depth].bytes;
  *(cudaStream_t *)stream = calls[depth].stream;
  return cudaSuccess;
}

static cudaError_t launched(enum kind kind, const char *name, cudaStream_t stream) {
  int device = stream_device(stream);
  note((struct record){.kind = kind, .device = device, .stream = stream_number(stream),
                       .name = name});
  if (device == current_device) return cudaSuccess;
  note((struct record){.kind = wrong_device_kind, .device = device, .name = name});
  fprintf(stderr, "null CUDA: %s is launched on a stream of device %d, and %d is current\n", name,
          device, current_device);
  return failed(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments,
                             size_t bytes, cudaStream_t stream) {
  const char *name = find(kernel)->name;
  cudaError_t error = launched(launch_kind, name ? name : "?", stream);
  if (error) return error;
  return grid.x && grid.y && grid.z ? cudaSuccess : failed(cudaErrorInvalidConfiguration);
}

/* Compilers of CUDA 13 launch through these two. */
cudaError_t __cudaGetKernel(cudaKernel_t *out, const void *kernel) {
  *out = (cudaKernel_t)kernel;
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments,
                               size_t bytes, cudaStream_t stream) {
  return cudaLaunchKernel((const void *)kernel, grid, block, arguments, bytes, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block,
                                        void **arguments, size_t bytes, cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, bytes, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel,
                                void **arguments) {
  return cudaLaunchKernel(kernel, how->gridDim, how->blockDim, arguments, how->dynamicSmemBytes,
                          how->stream);
}

/* For the libraries above the runtime: a function of theirs was called that launches on `stream`,
 * or, without `launches`, one that only prepares. */
int null_library(const char *name, cudaStream_t stream, int launches) {
  if (launches) return launched(library_kind, name, stream) != cudaSuccess;
  note((struct record){.kind = not_done_kind, .device = current_device, .name = name});
  return 0;
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 90;
  out->maxDynamicSharedSizeBytes = 232448;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute which, int value) {
  return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute which,
                                            int value, int device) {
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *kernel,
                                                                   int threads, size_t bytes,
                                                                   unsigned flags) {
  *out = threads ? 2048 / threads : 1;
  if (*out < 1) *out = 1;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *kernel,
                                                          int threads, size_t bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(out, kernel, threads, bytes, 0);
}
