/* Memory: addresses that are never used twice, and copies that are done at once. */
#define _GNU_SOURCE
#include "null.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* Device d has the addresses from DEVICES + d * SPAN on. Nothing is mapped there: the bytes lie
 * SHADOW further on. So the host crashes where it takes a card's address for its own. */
#define DEVICES 0x100000000000ULL
#define SPAN (1ULL << 40)
#define SHADOW 0x200000000000ULL
#define PINNED 0x080000000000ULL
#define PAGE (1ULL << 21)

struct block {
  uint64_t address, bytes;
  int alive;
};

static struct heap {
  uint64_t next, used;
  struct block *blocks; /* in the order of their addresses, since these only grow */
  size_t count, room;
  pthread_mutex_t lock;
} heaps[MAX_DEVICES + 1]; /* the last one is the host's pinned memory */

static struct {
  uint64_t address, bytes;
} registered[1024];
static int registrations;

__attribute__((constructor)) static void prepare(void) {
  for (int i = 0; i <= MAX_DEVICES; i++) {
    heaps[i].next = i < MAX_DEVICES ? DEVICES + i * SPAN : PINNED;
    pthread_mutex_init(&heaps[i].lock, 0);
  }
}

int device_of(const void *address) {
  uint64_t a = (uint64_t)address;
  return a >= DEVICES && a < DEVICES + MAX_DEVICES * SPAN ? (int)((a - DEVICES) / SPAN) : -1;
}

void *on_host(const void *address) {
  return device_of(address) < 0 ? (void *)address : (char *)address + SHADOW;
}

uint64_t memory_in_use(int device) { return heaps[device].used; }

static struct block *block_at(struct heap *heap, uint64_t address) {
  size_t low = 0, high = heap->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    struct block *block = &heap->blocks[middle];
    if (block->address + block->bytes <= address) low = middle + 1;
    else high = middle;
  }
  return low < heap->count && heap->blocks[low].address <= address ? &heap->blocks[low] : 0;
}

int is_allocated(const void *address, uint64_t bytes) {
  int device = device_of(address);
  if (device < 0 || !bytes) return 1;
  struct heap *heap = &heaps[device];
  pthread_mutex_lock(&heap->lock);
  struct block *block = block_at(heap, (uint64_t)address);
  int found = block && block->alive && (uint64_t)address + bytes <= block->address + block->bytes;
  pthread_mutex_unlock(&heap->lock);
  if (!found) fprintf(stderr, "null CUDA: %p + %lu is not allocated\n", address, bytes);
  return found;
}

static cudaError_t allocate(struct heap *heap, void **out, uint64_t bytes, uint64_t shadow,
                            uint64_t limit) {
  uint64_t size = (bytes + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&heap->lock);
  if (heap->used + size > limit) {
    pthread_mutex_unlock(&heap->lock);
    *out = 0;
    return failed(cudaErrorMemoryAllocation);
  }
  void *wanted = (void *)(heap->next + shadow);
  if (mmap(wanted, size, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0) != wanted) {
    perror("null CUDA: mmap");
    abort();
  }
  if (heap->count == heap->room) {
    heap->room = heap->room ? 2 * heap->room : 256;
    heap->blocks = realloc(heap->blocks, heap->room * sizeof *heap->blocks);
  }
  heap->blocks[heap->count++] = (struct block){heap->next, size, 1};
  *out = (void *)heap->next;
  heap->used += size;
  heap->next += size + PAGE; /* a gap, so that what runs over the end is found */
  pthread_mutex_unlock(&heap->lock);
  return cudaSuccess;
}

static cudaError_t release(struct heap *heap, void *address, uint64_t shadow) {
  pthread_mutex_lock(&heap->lock);
  struct block *block = block_at(heap, (uint64_t)address);
  int found = block && block->alive && block->address == (uint64_t)address;
  if (found) {
    munmap((char *)address + shadow, block->bytes);
    block->alive = 0;
    heap->used -= block->bytes;
  }
  pthread_mutex_unlock(&heap->lock);
  if (!found) fprintf(stderr, "null CUDA: %p is freed, and not allocated\n", address);
  return found ? cudaSuccess : failed(cudaErrorInvalidValue);
}

cudaError_t cudaMalloc(void **out, size_t bytes) {
  enter_device(current_device);
  cudaError_t error =
      allocate(&heaps[current_device], out, bytes, SHADOW, device_memory[current_device]);
  note((struct record){.kind = device_malloc_kind, .device = current_device, .bytes = bytes,
                       .address = (uint64_t)*out});
  return error;
}

cudaError_t cudaFree(void *address) {
  if (!address) return cudaSuccess;
  int device = device_of(address);
  if (device < 0) return failed(cudaErrorInvalidValue);
  note((struct record){.kind = device_free_kind, .device = device, .address = (uint64_t)address});
  return release(&heaps[device], address, SHADOW);
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream) {
  return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags) {
  note((struct record){.kind = host_malloc_kind, .device = current_device, .bytes = bytes});
  return allocate(&heaps[MAX_DEVICES], out, bytes, 0, 1ULL << 40);
}

cudaError_t cudaFreeHost(void *address) {
  note((struct record){.kind = host_free_kind, .device = current_device});
  return address ? release(&heaps[MAX_DEVICES], address, 0) : cudaSuccess;
}

cudaError_t cudaHostRegister(void *address, size_t bytes, unsigned flags) {
  if (registrations == 1024) return failed(cudaErrorMemoryAllocation);
  registered[registrations].address = (uint64_t)address;
  registered[registrations++].bytes = bytes;
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *address) {
  for (int i = 0; i < registrations; i++)
    if (registered[i].address == (uint64_t)address) {
      registered[i] = registered[--registrations];
      return cudaSuccess;
    }
  return failed(cudaErrorHostMemoryNotRegistered);
}

static int is_pinned(const void *address) {
  uint64_t a = (uint64_t)address;
  if (a >= PINNED && a < PINNED + 4 * SPAN) return 1;
  for (int i = 0; i < registrations; i++)
    if (a - registered[i].address < registered[i].bytes) return 1;
  return 0;
}

cudaError_t cudaMemGetInfo(size_t *unused, size_t *total) {
  *total = device_memory[current_device];
  *unused = *total - heaps[current_device].used;
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address) {
  int device = device_of(address);
  memset(out, 0, sizeof *out);
  out->device = -2;
  out->type = cudaMemoryTypeUnregistered;
  if (device >= 0) {
    out->type = cudaMemoryTypeDevice;
    out->device = device;
    out->devicePointer = (void *)address;
  } else if (is_pinned(address)) {
    out->type = cudaMemoryTypeHost;
    out->device = 0;
    out->devicePointer = out->hostPointer = (void *)address;
  }
  return cudaSuccess;
}

/* Off: copies into and between cards take no time, as on a card, where the host does not wait. */
static int moves = 1;
void null_moves(int on) { moves = on; }

static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream,
                        int is_asynchronous) {
  if (!is_allocated(to, bytes) || !is_allocated(from, bytes)) return failed(cudaErrorInvalidValue);
  int there = device_of(to), here = device_of(from), device = stream_device(stream);
  int pageable = there < 0 ? !is_pinned(to) : here < 0 && !is_pinned(from);
  /* As the runtime's documentation has it: a copy to pageable memory ends before it returns. */
  int blocks = !is_asynchronous || (there < 0 && pageable);
  enum kind kind = there < 0 ? (here < 0 ? copy_host_kind : copy_out_kind)
                   : here < 0 ? copy_in_kind
                   : there == here ? copy_within_kind
                                   : copy_peer_kind;
  struct record what = {.kind = kind, .device = device, .stream = stream_number(stream),
                        .address = (uint64_t)to, .source = (uint64_t)from, .bytes = bytes,
                        .flags = (blocks ? BLOCKS_HOST : 0) | (pageable ? PAGEABLE : 0)};
  struct CUgraph_st *graph = capture_of(stream);
  if (graph && (blocks || pageable)) return lose_capture(stream);
  if (!graph) note(what);
  if (graph) capture_bytes(graph, to, from, 0, bytes, what);
  else if (moves || there < 0 || bytes < PAGE) memmove(on_host(to), on_host(from), bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  return copy(to, from, bytes, 0, 0);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return copy(to, from, bytes, stream, 1);
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes,
                                cudaStream_t stream) {
  return copy(to, from, bytes, stream, 1);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch,
                              size_t width, size_t height, enum cudaMemcpyKind kind,
                              cudaStream_t stream) {
  for (size_t row = 0; row < height; row++) {
    cudaError_t error =
        copy((char *)to + row * to_pitch, (char *)from + row * from_pitch, width, stream, 1);
    if (error) return error;
  }
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  if (!is_allocated(to, bytes)) return failed(cudaErrorInvalidValue);
  struct record what = {.kind = fill_kind, .device = stream_device(stream),
                        .stream = stream_number(stream), .address = (uint64_t)to, .bytes = bytes};
  struct CUgraph_st *graph = capture_of(stream);
  if (graph) capture_bytes(graph, to, 0, value, bytes, what);
  else {
    note(what);
    memset(on_host(to), value, bytes);
  }
  return cudaSuccess;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, 0);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind) {
  return cudaSuccess; /* only kernels read it */
}

cudaError_t cudaGetSymbolAddress(void **out, const void *symbol) {
  static void *constants[MAX_DEVICES];
  if (!constants[current_device]) cudaMalloc(&constants[current_device], PAGE);
  *out = constants[current_device];
  return cudaSuccess;
}

uint64_t null_shadow(void) { return SHADOW; }
