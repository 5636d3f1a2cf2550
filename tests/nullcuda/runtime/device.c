/* Devices: how many there are, what they say of themselves, and errors.
 *
 * NULLCUDA_DEVICES: how many (4). NULLCUDA_MEMORY: bytes of each, with commas between them; the
 * last number holds for all that follow (80 GiB). NULLCUDA_PEERS: 0 for no peer access.
 * CUDA_VISIBLE_DEVICES: numbers of those that the process sees, as on a card.
 */
#define _GNU_SOURCE
#include "null.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Thread_local int current_device;
static _Thread_local cudaError_t last_error;
int device_count = 4, peers_allowed = 1;
uint64_t device_memory[MAX_DEVICES];
static int has_context[MAX_DEVICES];
static int number_in_machine[MAX_DEVICES];

/* The first number that no device has ends the list, as the driver has it. */
static void select_visible(const char *numbers) {
  int present = device_count, count = 0;
  for (int i = 0; i < MAX_DEVICES; i++) number_in_machine[i] = i;
  if (!numbers) return;
  while (*numbers && count < MAX_DEVICES) {
    char *end;
    long number = strtol(numbers, &end, 10);
    if (end == numbers || number < 0 || number >= present) break;
    number_in_machine[count++] = (int)number;
    numbers = *end ? end + 1 : end;
  }
  device_count = count;
}

__attribute__((constructor)) static void prepare(void) {
  const char *devices = getenv("NULLCUDA_DEVICES"), *peers = getenv("NULLCUDA_PEERS");
  const char *memory = getenv("NULLCUDA_MEMORY");
  if (devices) device_count = atoi(devices);
  if (device_count > MAX_DEVICES) device_count = MAX_DEVICES;
  select_visible(getenv("CUDA_VISIBLE_DEVICES"));
  if (peers) peers_allowed = atoi(peers);
  uint64_t bytes = 80ULL << 30;
  for (int i = 0; i < MAX_DEVICES; i++) {
    if (memory && *memory) {
      char *end;
      bytes = strtoull(memory, &end, 10);
      memory = *end ? end + 1 : end;
    }
    device_memory[i] = bytes;
  }
}

cudaError_t failed(cudaError_t error) {
  if (error) last_error = error;
  return error;
}

/* A context is what makes a process visible on a card, and costs hundreds of megabytes there. */
void enter_device(int device) {
  if (has_context[device]) return;
  has_context[device] = 1;
  note((struct record){.kind = context_kind, .device = device});
}

int null_has_context(int device) { return has_context[device]; }

cudaError_t cudaGetDeviceCount(int *out) {
  *out = device_count;
  return device_count ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int *out) {
  *out = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count) return failed(cudaErrorInvalidDevice);
  current_device = device;
  enter_device(device); /* since CUDA 12 it does */
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int device) {
  if (device < 0 || device >= device_count) return failed(cudaErrorInvalidDevice);
  memset(out, 0, sizeof *out);
  strcpy(out->name, "null CUDA");
  out->uuid.bytes[0] = (char)(number_in_machine[device] + 1);
  out->pciBusID = number_in_machine[device] + 1;
  out->totalGlobalMem = device_memory[device];
  out->major = 9; /* the limits below are those of compute capability 9.0 */
  out->multiProcessorCount = 132;
  out->warpSize = 32;
  out->maxThreadsPerBlock = out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
  out->maxThreadsDim[2] = 64;
  out->maxGridSize[0] = 2147483647;
  out->maxGridSize[1] = out->maxGridSize[2] = 65535;
  out->maxThreadsPerMultiProcessor = 2048;
  out->maxBlocksPerMultiProcessor = 32;
  out->sharedMemPerBlock = 49152;
  out->sharedMemPerBlockOptin = 232448;
  out->sharedMemPerMultiprocessor = 233472;
  out->reservedSharedMemPerBlock = 1024;
  out->regsPerBlock = out->regsPerMultiprocessor = 65536;
  out->totalConstMem = 65536;
  out->l2CacheSize = 50 << 20;
  out->textureAlignment = 512;
  out->texturePitchAlignment = 32;
  out->canMapHostMemory = out->unifiedAddressing = out->managedMemory = 1;
  out->concurrentKernels = out->cooperativeLaunch = out->memoryPoolsSupported = 1;
  out->asyncEngineCount = 3;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr which, int device) {
  switch (which) {
  case cudaDevAttrMultiProcessorCount: *out = 132; break;
  case cudaDevAttrMaxSharedMemoryPerBlock: *out = 49152; break;
  case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 232448; break;
  case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *out = 233472; break;
  case cudaDevAttrComputeCapabilityMajor: *out = 9; break;
  case cudaDevAttrMaxThreadsPerBlock: *out = 1024; break;
  case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
  case cudaDevAttrMaxGridDimX: *out = 2147483647; break;
  case cudaDevAttrWarpSize: *out = 32; break;
  case cudaDevAttrClockRate: *out = 1980000; break;
  case cudaDevAttrMemoryClockRate: *out = 2619000; break;
  case cudaDevAttrCooperativeLaunch:
  case cudaDevAttrUnifiedAddressing:
  case cudaDevAttrMemoryPoolsSupported: *out = 1; break;
  default: *out = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *out, int size, int device) {
  snprintf(out, size, "0000:%02x:00.0", number_in_machine[device] + 1);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int *out, int device, int peer) {
  *out = device != peer && peers_allowed;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
  static char enabled[MAX_DEVICES][MAX_DEVICES];
  if (enabled[current_device][peer]) return failed(cudaErrorPeerAccessAlreadyEnabled);
  enabled[current_device][peer] = 1;
  note((struct record){.kind = enable_peer_kind, .device = current_device});
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *out) {
  *out = CUDART_VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *out) { return cudaDriverGetVersion(out); }

cudaError_t cudaGetLastError(void) {
  cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

const char *cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorNull" : "cudaSuccess"; }

const char *cudaGetErrorString(cudaError_t error) {
  switch (error) {
  case cudaSuccess: return "no error";
  case cudaErrorMemoryAllocation: return "out of memory";
  case cudaErrorInvalidValue: return "invalid argument";
  case cudaErrorInvalidDevice: return "invalid device ordinal";
  case cudaErrorInvalidResourceHandle: return "invalid resource handle";
  case cudaErrorNotSupported: return "operation not supported";
  default: return "an error of the null CUDA";
  }
}

static int not_supported(void) { return cudaErrorNotSupported; }

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
  void *driver = dlopen("libcuda.so.1", RTLD_NOW);
  *out = driver ? dlsym(driver, name) : 0;
  if (!*out) *out = (void *)not_supported;
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result) {
  return cudaGetDriverEntryPointByVersion(name, out, CUDART_VERSION, flags, result);
}
#endif

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }

/* Behind every function of the runtime that torch knows and that is not written here. */
int null_not_done(const char *name) {
  note((struct record){.kind = not_done_kind, .device = current_device, .name = name});
  fprintf(stderr, "null CUDA: %s is not done\n", name);
  return failed(cudaErrorNotSupported);
}
